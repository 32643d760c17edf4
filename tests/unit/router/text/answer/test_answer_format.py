"""Every parser: its samples, in every split, broken in every way; and its choice by the chat template."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.text.answer.answer_format import CALL_FORMATS, ModelFormats, schemas_of
from router.text.answer.parts import CallStart
from tests.support.router.answers import JSON_PARIS, PARIS, SAMPLES, XML_PARIS, Sample, as_sample, parsed

FORMS = sorted({sample.form for sample in SAMPLES})
BROKEN = 170  # answers of each format: 1,020 in all


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.form}-{SAMPLES.index(sample)}")
def test_the_parts_of_an_answer(sample: Sample):
    assert as_sample(sample, parsed(sample, [sample.text])) == sample


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: f"{sample.form}-{SAMPLES.index(sample)}")
def test_one_character_at_a_time_makes_the_same_parts(sample: Sample):
    assert parsed(sample, list(sample.text)) == parsed(sample, [sample.text])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=100)
@given(data=st.data())
def test_any_split_of_the_text_makes_the_same_parts(form: str, data: st.DataObject):
    sample = data.draw(st.sampled_from([sample for sample in SAMPLES if sample.form == form]))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(sample.text)))))
    pieces = [sample.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(sample.text)], strict=True)]
    assert parsed(sample, pieces) == parsed(sample, [sample.text])


@pytest.mark.parametrize("form", CALL_FORMATS)
def test_no_broken_answer_raises_or_depends_on_its_split(form: str):
    draw = random.Random(form)
    samples = [sample for sample in SAMPLES if sample.form == form]
    for _ in range(BROKEN):
        sample = draw.choice(samples)
        broken = _broken(sample.text, draw)
        parts = parsed(sample, [broken])
        at = draw.randrange(len(broken) + 1)
        assert parsed(sample, [broken[:at], broken[at:]]) == parts, broken
        assert parsed(sample, list(broken)) == parts, broken


def _broken(text: str, draw: random.Random) -> str:
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(text) + 1)
        end = min(len(text), start + draw.randrange(8))
        other = draw.choice(["", "", text[end : end + 9], "\x00", '"', "\\", "\n", "}", "]", ")", "<", "\ud800", text])
        text = text[:start] + other + text[end:]
    return text


def test_an_answer_may_be_limited_to_one_call():
    for form, text in (("hermes", f"Look.{JSON_PARIS}\n{JSON_PARIS}"), ("qwen3_coder", f"Look.{XML_PARIS}{XML_PARIS}")):
        sample = Sample(form, text)
        assert as_sample(sample, parsed(sample, [text], max_calls=1)).calls == (PARIS,)


def test_arguments_come_while_the_model_writes_them():
    sample = Sample("hermes", JSON_PARIS)
    until = JSON_PARIS.index("aris")
    assert as_sample(sample, parsed(sample, [JSON_PARIS[:until]])).calls == (("weather", '{"city": "P'),)


def test_kimis_own_ids_are_the_ids_of_its_calls():
    sample = next(each for each in SAMPLES if each.form == "kimi")
    ids = [part.id for part in parsed(sample, [sample.text]) if isinstance(part, CallStart)]
    assert ids == ["functions.weather:0"] * 2


@pytest.mark.parametrize(
    ("template", "calls"),
    [
        ("<tool_call>\\n<function=' + name + '>\\n<parameter=' ... </think>", "qwen3_coder"),
        ('<tool_call>\\n{\\"name\\": <function-name>}', "hermes"),
        ("respond with <|tool_call|> followed by a JSON list", "granite"),
        ("<TOOLCALL>[{", "nemotron"),
        ("'<|tool_call_start|>['", "lfm2"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("{{ tools }}", None),
    ],
)
def test_the_chat_template_tells_the_format(template: str, calls: str | None):
    assert ModelFormats.of(template) == ModelFormats(calls, "think" if "</think>" in template else None)
    assert ModelFormats.of(template, "none", "none") == ModelFormats()
    assert ModelFormats.of(None, "granite", "think") == ModelFormats("granite", "think")


def test_an_answer_begins_inside_the_reasoning_that_the_prompt_opens():
    formats = ModelFormats(reasoning="think")
    assert formats.opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not formats.opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not ModelFormats().opens_reasoning("<think>\n")
    assert formats.opens_reasoning("<think>\nHm", is_inside=True)
    assert not formats.opens_reasoning("<think>\nHm\n</think>\nY", is_inside=True)


def test_tools_of_other_shapes_have_no_schema():
    tools = [{"function": {"name": "a", "parameters": {"type": "object"}}}, {"function": {"name": "b"}}, {"x": 1}]
    assert schemas_of(tools) == {"a": {"type": "object"}}
