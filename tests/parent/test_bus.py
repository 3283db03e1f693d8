"""The bus: order, ids, late and slow subscribers, the end."""

import asyncio

from parent.bus import RING, Bus


def test_a_subscriber_gets_what_comes_after_its_id_in_order_until_the_end() -> None:
    async def main() -> list[tuple[int, str]]:
        bus = Bus()
        bus.publish("state", "old")
        after = bus.last_id

        async def read() -> list[tuple[int, str]]:
            return [(event.id, event.data) async for event in bus.subscribe(after)]

        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        bus.publish("state", "a")
        await asyncio.sleep(0)
        bus.publish("state", "b")
        bus.publish("state", "c")
        bus.close()
        return await reader

    assert asyncio.run(main()) == [(2, "a"), (3, "b"), (4, "c")]


def test_a_subscriber_that_comes_back_with_an_old_id_gets_what_the_ring_still_has() -> None:
    async def main() -> list[int]:
        bus = Bus()
        for number in range(RING + 10):
            bus.publish("state", number)
        bus.close()
        return [event.data async for event in bus.subscribe(0)]

    assert asyncio.run(main()) == list(range(10, RING + 10))


def test_what_is_published_while_a_subscriber_is_busy_is_not_lost() -> None:
    async def main() -> list[int]:
        bus = Bus()
        seen: list[int] = []

        async def read() -> None:
            async for event in bus.subscribe(0):
                seen.append(event.data)
                if event.data == 0:
                    bus.publish("state", 1)
                    await asyncio.sleep(0)
                    bus.publish("state", 2)
                    bus.close()

        bus.publish("state", 0)
        await read()
        return seen

    assert asyncio.run(main()) == [0, 1, 2]
