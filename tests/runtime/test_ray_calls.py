"""How calls and replies travel over Ray: as bytes of our own where all in them is plain, else as Ray pickles them."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import pytest

from rolemesh.batch import Batch, BatchRef, block_meta
from rolemesh.observe import Metrics, Span
from rolemesh.protocols.backend import Call, Failure, Reply
from rolemesh.runtime.ray.host import flat_call, flat_reply, whole_call, whole_reply


class Own:
    """What another process may not be able to import."""


class Names(StrEnum):
    """As well: a string that is of a class of its own."""

    REWARD = "reward"


def call(*args: object, reads: str = "reward", **kwargs: object) -> Call:
    batch = Batch.from_columns({"draw": [1, 2], "sample": [0, 0], "reward": [0.5, None], f"extra/{type(reads).__name__}": [1, 2]})
    _, assembly = BatchRef.from_blocks([("block", block_meta(batch))]).assembly([reads])
    return Call("id", 1, 2, "group", "method", args, kwargs, assembly, 1, False)


@pytest.mark.parametrize("args", [(), (None, True, 3, 0.5, "text", b"bytes")])
def test_a_call_with_plain_arguments_travels_as_bytes_and_comes_whole(args):
    flat = flat_call(sent := call(*args))
    assert isinstance(flat, bytes)
    came = whole_call(flat)
    assert came._replace(assembly=None) == sent._replace(assembly=None)
    assert came.assembly.ids.tolist() == [[1, 0], [2, 0]]
    assert came.assembly.columns == ("reward",)


@pytest.mark.parametrize("sent", [call(Own()), call([1]), call(Names.REWARD), call(key=1), call(reads=Names.REWARD)])
def test_other_arguments_are_left_to_ray_which_pickles_by_value_what_cannot_be_imported(sent):
    flat = flat_call(sent)
    assert isinstance(flat, list)
    assert whole_call(flat) == sent


def test_a_reply_travels_as_bytes_unless_it_holds_what_only_ray_can_pickle():
    metrics = Metrics()
    metrics.mean("loss", 2.0, 3)
    plain = Reply(value=0.5, metrics=metrics, started=1.0, ended=2.0)
    assert isinstance(flat_reply(plain), bytes)
    came = whole_reply(flat_reply(plain))
    assert (came.value, came.started, came.ended, came.metrics.reduce()) == (0.5, 1.0, 2.0, metrics.reduce())
    own = Metrics()
    own.last(Names.REWARD, 1.0)
    span = Span(name="counting", start=1.0, end=2.0, process="", args={"rows": 3})
    assert isinstance(flat_reply(Reply(spans=(span,))), bytes)
    failed = Reply(failure=Failure(type="ValueError", message="", traceback="", at=0.0, error=None))
    for sent in (failed, Reply(value=Own()), Reply(value=[1]), Reply(metrics=own), Reply(spans=(replace(span, args={"of": Own()}),))):
        assert isinstance(flat_reply(sent), list)
        assert whole_reply(flat_reply(sent)) == sent
