"""The running loop's clock in a test's hands: a limit passes when the test says so, however busy the machine is."""

import asyncio


def soon(seconds: float = 5) -> float:
    return asyncio.get_running_loop().time() + seconds


def leap(seconds: float = 5) -> None:
    """It is so much later from now on, by the loop's clock: a deadline passes when all that must come before it has,
    however busy the machine is."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    vars(loop)["time"] = lambda: clock() + seconds


def leap_to(time_s: float) -> None:
    """It is that time now, by the loop's clock: what was to end then ends, and what was to end later does not yet."""
    leap(time_s - asyncio.get_running_loop().time())


async def turns(number: int = 50) -> None:
    for _ in range(number):
        await asyncio.sleep(0)
