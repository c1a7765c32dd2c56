from __future__ import annotations

import pytest

from rolemesh.protocols.reward import Sample


@pytest.fixture
def sample():
    def make(response, answer=None, *, draw=0, number=0, source="sums", task=None):
        return Sample(
            draw=draw, sample=number, source=source, prompt="?", response=response, answer=answer, task=task or {}, finish_reason="stop"
        )

    return make
