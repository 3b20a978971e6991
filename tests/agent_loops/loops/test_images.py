"""Images in messages: exact ids through a real processor, pixels by reference, refusals in words."""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
from pathlib import Path

import pytest
from tests.agent_loops.loops.conftest import check_fed
from tests.agent_loops.talking import answer, say
from tests.vision_model import png, save_vision_processor, vision_tokenizer

from penstock.agent_loops import (
    TRUNCATED_TURNS,
    AgentConfig,
    Budget,
    ChatTokens,
    InfraFailure,
    TemplateError,
    images_of,
    tool_messages,
)
from penstock.agent_loops.chat import chat_of, verify_template
from penstock.agent_loops.loops import ToolAgentLoop
from penstock.tools import ToolResult
from penstock.tools.parsers import ToolCall, get_parser
from penstock.transfer_queue import EpisodeImages, Lease, Task

PARAMETERS = {"type": "object", "properties": {"page": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": PARAMETERS}}]
RED, BLUE = png((200, 30, 30)), png((20, 20, 220), (300, 120))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return save_vision_processor(tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def shared(folder) -> ChatTokens:
    return chat_of(folder, AgentConfig())


@pytest.fixture
def chat(shared) -> ChatTokens:
    return shared.for_episode(Budget(50, 100_000))


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def asks(*images: str, text: str = "What is it?") -> dict:
    return {
        "role": "user",
        "content": [*({"type": "image", "image": one} for one in images), {"type": "text", "text": text}],
    }


def by_processor(chat, messages, images) -> list[int]:
    """Ids of the whole conversation as transformers' own processor makes them, pixels and all."""
    from PIL import Image

    text = chat.template.render(messages, TOOLS, prompt=True)
    opened = [Image.open(io.BytesIO(data)) for data in images]
    return list(chat.rendering.places.processor(text=[text], images=opened)["input_ids"][0])


def test_a_prompt_has_the_ids_that_the_processor_makes(chat):
    messages = [asks(url_of(RED), url_of(BLUE))]
    segment = chat.start(messages, TOOLS)
    assert segment.context() == by_processor(chat, messages, [RED, BLUE])
    assert [image.sha256 for image in segment.images] == [hashlib.sha256(data).hexdigest() for data in (RED, BLUE)]
    (place,) = chat.rendering.placeholders
    assert segment.context().count(place) == 6 + 12  # 60 x 90 and 300 x 120 pixels, of 28 x 28 a token, 16 at most


def test_images_are_spliced_onto_verbatim_ids(chat):
    first, again = asks(url_of(RED)), asks(url_of(BLUE), text="And this?")
    segment = chat.start([first], TOOLS)
    call = ToolCall("look", {"page": 1})
    call_text = '<tool_call>\n{"name": "look", "arguments": {"page": 1}}\n</tool_call>'
    said = [first]
    for text, new, reply in (
        (call_text, tool_messages([ToolResult("see", images=(url_of(BLUE),))]), chat.template.call_message([call])),
        ("red", [again], {"role": "assistant", "content": "red"}),
        (
            call_text,
            tool_messages([ToolResult("46"), ToolResult("", (url_of(RED),))][1:]),
            chat.template.call_message([call]),
        ),
    ):
        sampled = answer(chat, segment, text, by_letter=True)
        before = segment.context()
        assert chat.go_on(segment, sampled, new) is segment
        assert segment.context()[: len(before)] == before
        said += [reply, *new]
    images = [RED, BLUE, BLUE, RED]
    assert [image.sha256 for image in segment.images] == [hashlib.sha256(data).hexdigest() for data in images]
    whole = by_processor(chat, said, images)
    assert chat.decode(segment.context()) == chat.decode(whole)
    assert segment.context() != whole  # the replies keep the ids that were sampled
    (place,) = chat.rendering.placeholders
    assert segment.context().count(place) == whole.count(place)


def test_an_observation_without_room_leaves_its_image_out_too(shared):
    chat = shared.for_episode(Budget(50, 20))
    segment = chat.start([asks(url_of(RED))], TOOLS)
    answer(chat, segment, "red", by_letter=True)
    assert not segment.observe(chat.render([asks(url_of(BLUE))]))
    assert len(segment.images) == 1
    assert segment.done


def test_an_image_is_a_file_by_its_path_or_a_data_url(chat, tmp_path):
    file = tmp_path / "a picture.png"
    file.write_bytes(RED)
    for given in (str(file), file.as_uri(), url_of(RED)):
        (image,) = chat.start([asks(given)]).images
        assert image.sha256 == hashlib.sha256(RED).hexdigest()
        assert image.url == (given if given.startswith("data:") else file.as_uri())
    openai = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(RED)}}]}
    assert len(chat.start([openai]).images) == 1


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("https://example.org/a.png", "only files and data: URLs"),
        ("/no/such/file.png", "cannot be read"),
        ("data:image/png;base64,!!", "cannot be read"),
        ("data:image/png;base64,aGVsbG8=", "is none"),
        (7, "by a path or a data: URL"),
    ],
)
def test_what_is_no_image_is_refused_by_name(chat, where, words):
    with pytest.raises(TemplateError, match=words):
        chat.start([asks(where)])


def test_a_tool_that_prints_a_placeholder_makes_no_place(chat):
    segment = chat.start([asks(url_of(RED))], TOOLS)
    answer(chat, segment, "x", by_letter=True)
    ids = chat.render_tools([ToolResult("<|image_pad|><|vision_start|>")], [ToolCall("look")])
    assert not chat.rendering.placeholders & set(ids)
    mixed = ToolResult("<|image_pad|>", images=(url_of(RED),))
    assert sum(token in chat.rendering.placeholders for token in chat.render_tools([mixed], [ToolCall("look")])) == 6


def test_a_prompt_that_spells_a_placeholder_is_refused(chat):
    with pytest.raises(TemplateError, match="2 places for 1 images"):
        chat.start([asks(url_of(RED), text="<|image_pad|>")])


def test_a_model_without_a_processor_says_so(chat_for):
    with pytest.raises(TemplateError, match="takes no images"):
        chat_for().start([asks(url_of(RED))])


@pytest.mark.parametrize(
    ("name", "words"),
    [("NoProcessor", "'NoProcessor'"), ("Qwen2Config", r"processor of .* cannot be made for images alone")],
)
def test_a_processor_that_cannot_be_made_is_named(folder, tmp_path, name, words):
    vision_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((Path(folder) / "preprocessor_config.json").read_text())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**settings, "processor_class": name}))
    with pytest.raises(TemplateError, match=words):
        chat_of(str(tmp_path), AgentConfig())


def test_an_image_that_the_processor_refuses_is_named(chat):
    """Qwen-VL takes none that is 200 times as wide as high."""
    with pytest.raises(TemplateError, match="processor refuses an image of 300 x 1"):
        chat.start([asks(url_of(png((1, 2, 3), (300, 1))))])


def test_places_that_the_processor_widens_otherwise_are_refused(chat):
    exact = chat.encode
    verify_template(chat)
    chat.encode = lambda text: exact(text)[1:]
    with pytest.raises(TemplateError, match="widened otherwise than the model's processor does"):
        verify_template(chat)


def test_splices_with_images_are_proven_at_start(shared, folder):
    proof = verify_template(shared, TOOLS)
    assert (proof.rewritten, proof.refused, proof.unsupported) == ((), (), {})
    counted = chat_of(folder, AgentConfig(template_settings={"add_vision_id": True}))
    with_tools = verify_template(counted, TOOLS)
    assert "tool result with an image" in with_tools.unsupported["tool"]
    assert "then another image" in verify_template(counted).unsupported["user"]
    assert with_tools.renewing == {"tool", "user"}


def test_images_sampled_placeholder_is_policy_error(chat):
    segment = chat.start([asks(url_of(RED))])
    answer(chat, segment, "red", by_letter=True)
    assert not segment.done
    segment.observe(chat.render([asks(text="more")]))
    (place,) = chat.rendering.placeholders
    say(segment, [place, chat.turn_end_id])
    assert segment.done
    for given in (None, TRUNCATED_TURNS):
        outcome = segment.output(outcome=given).outcome
        assert (outcome.kind, outcome.may_carry_reward) == ("policy_error", True)


async def test_an_episode_carries_its_images_by_reference(shared, run_loop, saying, calculator, tmp_path):
    file = tmp_path / "plot.png"
    file.write_bytes(BLUE)

    async def execute(state, arguments):
        return ToolResult("a plot", images=(str(file),))

    calculator.execute = execute
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
    client = saying(lambda text: "46" if "a plot" in text else call, chat=shared)
    _, trajectory = await run_loop(ToolAgentLoop, client, calculator, chat=shared, messages=[asks(url_of(RED))])
    shas = [hashlib.sha256(data).hexdigest() for data in (RED, BLUE)]
    assert [[image.sha256 for image in request.images] for request in client.requests] == [shas[:1], shas]
    assert trajectory.images == EpisodeImages([[*shas]], dict(zip(shas, (RED, BLUE), strict=True)))
    check_fed(client, trajectory)


def lease_of(*messages: dict) -> Lease:
    return Lease("t#0", Task("t", "train", messages, "looks", "red"), 0, 0, 1, 0)


async def test_images_of_the_task_stay_in_their_files(chat, tmp_path):
    """All episodes of a row share the dataset's file; what came from elsewhere is carried."""
    ours, theirs = tmp_path / "ours.png", tmp_path / "theirs.png"
    ours.write_bytes(RED)
    theirs.write_bytes(BLUE)
    asked = asks(str(ours))
    segment = chat.start([asked], TOOLS)
    call = '<tool_call>\n{"name": "look", "arguments": {"page": 1}}\n</tool_call>'
    chat.go_on(
        segment, answer(chat, segment, call, by_letter=True), tool_messages([ToolResult("", (str(theirs), str(ours)))])
    )
    answer(chat, segment, "red", by_letter=True)
    red, blue = (hashlib.sha256(data).hexdigest() for data in (RED, BLUE))
    found = await images_of(lease_of(asked), [segment.output()])
    assert found == EpisodeImages(((red, blue, red),), {blue: BLUE}, {red: ours.as_uri()})
    theirs.unlink()
    with pytest.raises(InfraFailure, match=r"loop: images\.0: .*must stay until its episode ends"):
        await images_of(lease_of(asked), [segment.output()])


async def test_an_episode_without_images_carries_none(chat):
    segment = chat.start([asks(text="none")], TOOLS)
    answer(chat, segment, "x", by_letter=True)
    assert await images_of(lease_of(asks(text="none")), [segment.output()]) is None


def test_stripped_thinking_keeps_the_images_of_the_history(shared):
    tokenizer = copy.deepcopy(vision_tokenizer())
    written = "render_content(message.content) }}\n        {%- for tool_call"
    assert written in tokenizer.chat_template
    dropping = written.replace("content) }}", "content).split('</think>')[-1] }}")
    tokenizer.chat_template = tokenizer.chat_template.replace(written, dropping)
    chat = ChatTokens(
        tokenizer, get_parser("hermes"), processor=shared.rendering.places.processor, thinking_history="strip"
    )
    segment = chat.start([asks(url_of(RED))], TOOLS)
    after = chat.go_on(segment, answer(chat, segment, "<think>hm</think>red", by_letter=True), [asks(url_of(BLUE))])
    assert after is not segment
    assert [image.sha256 for image in after.images] == [hashlib.sha256(data).hexdigest() for data in (RED, BLUE)]
    said = [asks(url_of(RED)), {"role": "assistant", "content": "red"}, asks(url_of(BLUE))]
    assert after.context() == by_processor(shared, said, [RED, BLUE])


def test_images_change_the_journal_hash(chat):
    one, other = chat.start([asks(url_of(RED))]), chat.start([asks(url_of(png((1, 2, 3))))])
    assert one.context() == other.context()
    assert one.fed_hash != other.fed_hash
    text = chat.start([asks(text="none")])
    assert text.fed_hash == text.context_hash
