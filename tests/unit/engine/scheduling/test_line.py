"""The line before an engine: in order of arrival at the router, and no longer than a request has time."""

from dataclasses import replace

from headrace.cache.hits import ReceiveState
from headrace.engine.build import BuiltEngine, build_engine
from headrace.engine.sequence import AdmissionTimedOut, Admitted, Event, Started
from headrace.step_costs import StepCosts, StepShape
from tests.support.engine.driving import GREEDY, Run, request, run_all, serve, sized, submit
from tests.support.engine.fake_device import FakeDevice

ONE = replace(GREEDY, max_tokens=1)
LONG = [5 + i % 100 for i in range(1000)]


COSTS = StepCosts(step_s=6e-3, decode_s=1e-3, context_s=0.0, chunk_s=7e-3, token_s=2e-4, depth_s=0.0)
"""Of steps, known: on a busy machine the line would be measured anew between an estimate and the next."""


def engine(tiny_checkpoint) -> BuiltEngine:
    path, device = tiny_checkpoint("granite"), FakeDevice(COSTS)
    built = build_engine(str(path), sized(path, 70, 6, max_step_tokens=64), device.clock)
    device.compute_for(built)
    return built


def now_s(built: BuiltEngine) -> float:
    return built.engine._clock()


def waiting_s(built: BuiltEngine) -> float:
    """Seconds that the prompts which are there take, by the engine's own measurement."""
    load = built.engine.load
    prompts = StepShape(prefill_tokens=load.waiting_tokens, prefill_depths=load.waiting_depths)
    return built.engine.cost_fit.costs.line_s(prompts, StepShape(), chunk_tokens=64)


def test_a_request_that_was_sent_on_keeps_its_place(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    order: list[str] = []

    def submitted(name: str, age_s: float) -> Run:
        def note(event: Event) -> None:
            run.events.append(event)
            if isinstance(event, Admitted):
                order.append(name)

        run = Run(None, [])
        prompt = [5 + len(name)] * 600  # two do not fit
        run.sequence = submit(built, request(prompt, ONE, age_s=age_s), on_event=note).sequence
        return run

    runs = [submitted("running", 0.0)]
    built.engine.admit()
    runs += [submitted("new", 0.0), submitted("renewed", 30.0)]
    serve(built, *runs)
    assert order == ["running", "renewed", "new"]


def test_a_client_that_asks_now_and_then_does_not_wait_for_one_that_always_does(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    runs = [submit(built, request([5 + i] * 200, ONE, client=1)) for i in range(3)]
    built.engine.admit()
    for _ in range(3):
        built.engine.step()
    light = submit(built, request([9] * 100, ONE, client=2))
    serve(built, light)
    assert not any(run.is_finished for run in runs[1:])
    serve(built, *runs)


def test_a_client_with_many_slow_requests_does_not_keep_out_another_s_first(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    slow = replace(GREEDY, max_tokens=12)
    runs = [submit(built, request([5 + i] * 20, slow, client=1)) for i in range(20)]
    built.engine.admit()
    light = submit(built, request([99] * 20, ONE, client=2))
    while not light.is_finished:
        built.engine.admit()
        built.engine.step()
        for run in runs:
            if run.is_finished:
                built.engine.release(run.sequence)
    built.engine.release(light.sequence)
    assert sum(not run.events for run in runs) >= 10  # those had come before it, and still wait
    serve(built, *runs)


def test_a_prompt_starts_once_with_its_first_chunk(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    run = submit(built, request(LONG[:200], ONE))
    run_all(built)
    kinds = [type(event).__name__ for event in run.events]
    assert kinds[:3] == ["Admitted", "Started", "Computed"]
    assert sum(isinstance(event, Started) for event in run.events) == 1


def test_waiting_tokens_are_those_still_to_be_computed(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    submit(built, request(LONG[:300], ONE))
    submit(built, request([9] * 100, ONE))
    assert built.engine.load.waiting_tokens == 400
    built.engine.admit()
    built.engine.step()
    assert built.engine.load.waiting_tokens == 400 - 64
    run_all(built)
    assert built.engine.load.waiting_tokens == 0


def test_a_request_is_refused_at_once_when_the_line_lasts_longer_than_it_has(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    first = submit(built, request(LONG, ONE))
    built.engine.admit()
    for _ in range(4):
        built.engine.step()
    line_s = waiting_s(built)
    assert line_s > 0
    hasty = submit(built, request([9] * 600, ONE), compute_by_s=now_s(built) + line_s / 10)
    patient = submit(built, request([8] * 600, ONE), compute_by_s=now_s(built) + line_s * 10 + 60)
    old = submit(built, request([7] * 600, ONE, age_s=60.0), compute_by_s=now_s(built) + line_s / 10)
    (refused,) = hasty.events
    assert isinstance(refused, AdmissionTimedOut) and "tokens of other prompts come first" in refused.message
    assert len(old.events) == 1, "what runs shares the steps, however old a newcomer is"
    serve(built, first, patient)
    assert len(first.tokens) == len(patient.tokens) == 1


def test_a_short_prompt_is_refused_for_long_ones_only_if_it_must_wait_for_their_blocks(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    submit(built, request(LONG, ONE))
    built.engine.admit()
    for _ in range(4):
        built.engine.step()
    line_s = waiting_s(built)

    def chat(token: int) -> Run:
        return submit(built, request([token] * 10, ONE), compute_by_s=now_s(built) + line_s / 10)

    beside = chat(7)
    assert not beside.events
    built.engine.admit()
    built.engine.step()
    submit(built, request([8] * 300, ONE))
    built.engine.admit()
    (refused,) = chat(9).events
    assert isinstance(refused, AdmissionTimedOut)
    run_all(built)
    assert len(beside.tokens) == 1


def test_a_prompt_for_another_node_waits_for_room_unless_requests_that_wait_for_others_hold_it(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    prompt = [9] * 600
    running = submit(built, request(LONG, replace(GREEDY, max_tokens=4)))
    built.engine.admit()
    sent = submit(built, request(prompt, ONE), yield_by_s=now_s(built) - 1, is_sent=True)
    serve(built, running, sent)
    assert len(sent.tokens) == 1, "what runs ends"
    receiving = submit(built, request(LONG, GREEDY), hit_policy=lambda hit: ReceiveState())
    built.engine.admit()
    sent, local = (submit(built, request(prompt, ONE), yield_by_s=by) for by in (now_s(built) - 1, None))
    assert (built.engine.next_deadline_s() or 0) < now_s(built)
    built.engine.admit()
    assert isinstance(sent.events[0], AdmissionTimedOut) and not local.events
    built.engine.release(receiving.sequence)
    serve(built, local)


def test_a_short_prompt_is_not_refused_for_the_long_ones_that_it_passes_in_a_full_cache(tiny_checkpoint) -> None:
    built = engine(tiny_checkpoint)
    running = submit(built, request(LONG, ONE))
    built.engine.admit()
    for _ in range(4):
        built.engine.step()
    line_s = waiting_s(built)
    long = [submit(built, request([5 + i] * 600, ONE)) for i in range(20)]
    built.engine.admit()  # the first of them finds no room
    chat = submit(built, request([9] * 10, ONE), compute_by_s=now_s(built) + line_s * 8)
    assert not chat.events, "12,000 tokens are before it, of which it waits for 600 and what runs"
    assert submit(built, request([9] * 700, ONE), compute_by_s=now_s(built) + line_s).events
    serve(built, running, chat)
    assert len(chat.tokens) == 1 and not any(run.is_finished for run in long[1:])
    serve(built, *long)
