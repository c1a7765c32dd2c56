"""What a run tells about itself: metrics, spans, events, sinks, the run directory, and the display in the terminal.

Workers record `Metrics` and spans and return them with their calls; the controller merges, writes and shows them. Nothing here
imports torch or Ray.
"""

from rolemesh.observe.catalogue import METRICS, MetricInfo, describe, metrics_reference
from rolemesh.observe.metrics import Metrics

__all__ = ["METRICS", "MetricInfo", "Metrics", "describe", "metrics_reference"]
