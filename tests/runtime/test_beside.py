import asyncio

from rolemesh.runtime import beside


async def test_work_beside_a_block_ends_with_it() -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            seen.append("ended")

    async with beside(work(), seen.append, "nothing is done"):
        await asyncio.sleep(0)
        assert seen == []
    assert seen == ["ended"]


async def test_work_that_fails_is_told_of_at_once_and_the_block_goes_on() -> None:
    heard: list[str] = []

    async def work() -> None:
        raise OSError("disk full")

    async with beside(work(), heard.append, "status is not written"):
        await asyncio.sleep(0.01)
        assert heard == ["status is not written any more: OSError: disk full"]
    assert len(heard) == 1
