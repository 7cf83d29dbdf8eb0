"""`edgespec run`: one prompt in, one answer out."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import typer

from edgespec.cli import options
from edgespec.cli.answer_writer import color_option, repeats, show_answer, with_progress
from edgespec.cli.options import PROMPT, FormatOptions, SamplingOptions
from edgespec.cli.render import memory_json, models_text, note, size_text
from edgespec.cli.start import cancel_on_interrupt, load_engine
from edgespec.errors import UnsupportedError
from edgespec.memory.plan.options import DRAFTS
from edgespec.option_fields import argument, option
from edgespec.paths import read_stdin, read_text

if TYPE_CHECKING:
    from edgespec.decode.engine import Engine, Prompt
    from edgespec.decode.generation import Result
    from edgespec.memory.plan.plan import Plan, Request
    from edgespec.models.chat import ChatMessage
    from edgespec.models.images import Image
    from edgespec.models.spec import ModelSpec
    from edgespec.sampling.params import SamplingParams

_LOG = logging.getLogger("edgespec.drafts")
_WORTH_TELLING = 0.1  # of the steps
_COUNTED = (
    *("prompt_tokens", "rounds", "contended_rounds", "drafted_tokens", "accepted_tokens"),
    *("changed_tokens", "acceptance_length", "time_to_first_token_s", "decode_s", "tokens_per_s"),
    *("draft_s", "host_share"),
)
_SILENT_S = 1.0  # that stdin is waited for without a word


@dataclasses.dataclass(frozen=True)
class RunOptions(options.Group):
    """What is asked, and what comes of the answer."""

    TITLE: ClassVar[str] = PROMPT

    prompt: str | None = argument("The prompt. Default: --file, or stdin (-).", panel=PROMPT)
    asked: str | None = option(None, "The prompt, instead of the argument.", called="--prompt -p")
    file: Path | None = option(None, "Read the prompt from this file.", also="-f")
    system: str | None = option(None, "System message.")
    image: list[str] | None = option(
        None, "Show this image with the prompt; - reads it from stdin."
    )
    audio: list[str] | None = option(
        None, "Play this sound with the prompt; - reads it from stdin."
    )
    raw: bool = option(False, "Send the prompt as it is, without the model's chat format.")
    max_tokens: int = options.max_tokens_option()
    stop: list[str] | None = option(
        None, "End the answer before this text.", also="--reverse-prompt -r"
    )
    color: str = color_option()
    check: bool = option(False, "Answer again without drafts, and compare.", panel=DRAFTS)
    as_json: options.JsonOption = False

    def named(self, model: options.ModelOptions) -> tuple[options.ModelOptions, str | None]:
        """Tell what names a model from a prompt, where only one argument is given; "-" is neither.

        Raises ModelNotFoundError for a word that is neither.
        """
        from edgespec.models.hub.resolve import is_name, missing

        given, prompt = model.model, self.asked if self.prompt is None else self.prompt
        if self.prompt == "-":  # as of many programs: stdin has it
            return model, self.asked
        if given == "-" and self.prompt is None:
            return dataclasses.replace(model, model=None), self.asked
        if self.asked is not None and self.prompt is not None:
            raise typer.BadParameter("give the prompt as an argument or with --prompt, not both")
        if given is None or self.prompt is not None or is_name(given):
            return model, prompt
        is_named = model.named is not None or model.hf_repo is not None
        is_text = not given.strip() or " " in given.strip() or "\n" in given
        if self.asked is None and (is_named or is_text):
            return dataclasses.replace(model, model=None), given
        problem = missing(given)
        problem.hint = f"a prompt of one word is --prompt {given[:40]}; {problem.hint}"
        raise problem

    def text(self, prompt: str | None, *, reads_stdin: bool = False) -> str:
        """The prompt, of --file or stdin where there is none; an empty one is misuse.

        What is piped in beside it comes first, and `reads_stdin` where stdin was named.
        """
        if prompt is not None and self.file is not None:
            raise typer.BadParameter("give the prompt as an argument or with --file, not both")
        if self.file is not None:
            prompt = read_text(self.file)
        if prompt is not None:
            is_taken = "-" in (*(self.image or ()), *(self.audio or ()))
            piped = "" if is_taken else read_stdin() if reads_stdin else _piped()
            prompt = f"{piped.rstrip()}\n\n{prompt}" if piped.strip() else prompt
        else:
            if sys.stdin.isatty():
                raise typer.BadParameter(
                    "no prompt: give one as an argument, with --file, or on stdin"
                )
            prompt = read_stdin()
        if not prompt.strip():
            raise typer.BadParameter("the prompt is empty")
        return prompt

    def images(self) -> list[Image]:
        """Images and sounds of files, or of stdin. Raises UnsupportedError."""
        from edgespec.models.images import MAX_BYTES, read_image

        names = [*(self.image or []), *(self.audio or [])]
        if names.count("-") > 1:
            raise typer.BadParameter("stdin, which - reads, is there once")
        return [
            read_image(sys.stdin.buffer.read(MAX_BYTES + 1) if name == "-" else name)
            for name in names
        ]

    def messages(
        self, text: str, spec: ModelSpec, images: Sequence[Image]
    ) -> str | list[ChatMessage]:
        """What a model of this process is asked. Raises UnsupportedError without a template."""
        if self.raw or self.system is None:
            return text
        if spec.chat_template is None:
            raise UnsupportedError("this model has no chat template, so --system has no place")
        shown = [image.part for image in images]
        content = [*shown, {"type": "text", "text": text}] if shown else text
        return [
            {"role": "system", "content": self.system},
            {"role": "user", "content": content},
        ]


def _piped() -> str:
    """What is piped in beside a prompt; "" where there is nothing, or stdin is not this command's.

    In `while read LINE; do edgespec run ...; done` the loop's lines are on it. Of a file something
    was read then; a pipe is the stdin of the program that started this one, too, as Linux tells.
    """
    try:
        number = sys.stdin.fileno()
        own = os.fstat(number)
    except (OSError, ValueError):  # there is none
        return ""
    if stat.S_ISREG(own.st_mode):
        place = os.lseek(number, 0, os.SEEK_CUR)
        is_own, has_more = place == 0, place < own.st_size
    elif stat.S_ISFIFO(own.st_mode):
        is_own, has_more = False, _waits(number)
        with suppress(OSError):  # another system, or another user's program
            is_own = not os.path.samestat(own, os.stat(f"/proc/{os.getppid()}/fd/0"))
    else:
        return ""
    if is_own:
        waits = threading.Timer(_SILENT_S, note, ["reading stdin; </dev/null if there is nothing"])
        waits.daemon = True
        waits.start()
        try:
            return read_stdin()
        finally:
            waits.cancel()
    if has_more:
        note("stdin is not read, as another program may have to: - reads it anyway")
    return ""


def _waits(number: int) -> bool:
    """Whether there is something in a pipe."""
    try:
        import fcntl
        import termios
    except ImportError:  # Windows
        return False
    return bool(int.from_bytes(fcntl.ioctl(number, termios.FIONREAD, bytes(4)), sys.byteorder))


def run(
    model: options.ModelOptions,
    plan_options: options.PlanOptions,
    sampling_options: SamplingOptions,
    format_options: FormatOptions,
    wanted: RunOptions,
) -> None:
    """Answer one prompt. Example: edgespec run model.gguf "Why is the sky blue?"

    One argument with a space in it is a prompt for the embedded model; one word names a model.
    """
    from edgespec.memory.device.energy import measured_energy
    from edgespec.models.images import Sound
    from edgespec.models.onnx.folder import read_model
    from edgespec.setup.planning import most_prompt_tokens

    reads_stdin = "-" in (model.model, wanted.prompt)
    model, prompt = wanted.named(model)
    images, text = wanted.images(), wanted.text(prompt, reads_stdin=reads_stdin)
    sampling, texts = sampling_options.params(), format_options.texts()
    spec = read_model(model.path(plan_options))
    messages = wanted.messages(text, spec, images)
    request = plan_options.request(
        prompt_tokens=most_prompt_tokens(spec, [messages], raw=wanted.raw),
        max_tokens=wanted.max_tokens,
        images=len(images),
        is_plain_greedy=sampling.is_plain_greedy and not any(texts.values()),
        is_one_text=True,
        keeps_to_form=any(texts.values()),
        sounds_s=tuple(one.seconds for one in images if isinstance(one, Sound)),
    )
    if wanted.check:
        _require_comparable(request, sampling.accept_typical)
    cancel = cancel_on_interrupt()
    arguments: dict[str, Any] = {
        "max_tokens": wanted.max_tokens,
        "stop": wanted.stop or (),
        "raw": wanted.raw,
        "cancel": cancel,
        "images": images if isinstance(messages, str) else (),
        **texts,
    }
    plan, engine = load_engine(spec, request, cancel, quiet=wanted.as_json)
    with engine:
        is_free = sampling.draws_freely and not request.exact and not any(texts.values())
        if wanted.check and is_free and engine.draws_drafts:
            raise UnsupportedError(
                "--check compares token by token, and drafts that a model or a head draws give the "
                "same seed another text of the same distribution",
                hint="use --exact, which draws none, or --temperature 0",
            )
        with measured_energy(idle=wanted.as_json) as energy:
            stream = engine.stream(messages, sampling=sampling, **arguments)
            if wanted.as_json:
                for _ in stream:
                    pass
            else:
                show_answer(with_progress(stream), wanted.color)
        result, checked = stream.result, None
        if wanted.check and result.finish_reason != "cancelled":
            again = dataclasses.replace(sampling, seed=stream.seed)
            checked = _check(engine, messages, again, arguments, result)
            checked = None if cancel.is_set() else checked  # then it compared only a part
        measured = _report(plan, engine, result, stream.seed, checked)
        if engine.drafter is not None:  # what became of each, or why there is none
            reasons = engine.drafter.reasons()
        else:
            said = (choice.reason for choice in plan.choices if choice.name == "drafter")
            reasons = f"no drafter: {next(said, 'none was asked for')}"
        _LOG.info("drafts: %s", reasons)
        measured |= energy.as_json(len(result.token_ids))
    if wanted.as_json:
        print(json.dumps(measured))
    else:
        note(_summary(measured))
    if cancel.is_set():
        raise typer.Exit(130)


def _require_comparable(request: Request, accept_typical: float) -> None:
    """Raise UnsupportedError where another text than plain decoding's is no mistake."""
    problem = ""
    if accept_typical:
        problem = "with plain decoding, and --accept typical writes another text"
    elif request.switch is not None:
        problem = "with one model's plain decoding, and with --switch two models write"
    if problem:
        raise UnsupportedError(f"--check compares {problem}", hint="leave out one of them")


# -- running -------------------------------------------------------------------------------


def _check(
    engine: Engine, prompt: Prompt, sampling: SamplingParams, arguments: Any, result: Result
) -> dict[str, Any]:
    """Generate again with plain decoding; where the outputs part, how close the choice was."""
    from edgespec.measure.noise import find_divergence, measure_batch_noise

    plain = engine.generate(prompt, sampling=sampling, speculate=False, **arguments)
    images = arguments["images"]
    ids = engine.encode(prompt, raw=bool(arguments["raw"]), images=images)
    compared = min(len(plain.token_ids), len(result.token_ids))
    divergence = find_divergence(
        engine.backend,
        ids,
        plain.token_ids[:compared],
        result.token_ids[:compared],
        engine.shown(prompt, images).places(ids),
    )
    return {
        "identical": divergence is None,
        "compared_tokens": compared,
        "position": divergence.position if divergence else None,
        "best_two_logits_gap": divergence.gap if divergence else None,
        "batch_noise": measure_batch_noise(engine.backend) if divergence else None,
        "plain_tokens_per_s": plain.counters.tokens_per_s,
    }


# -- reporting -----------------------------------------------------------------------------


def _report(
    plan: Plan, engine: Engine, result: Result, seed: int | None, checked: dict[str, Any] | None
) -> dict[str, Any]:
    from edgespec.memory.device.track import peak_resident_bytes

    counters = result.counters
    report: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "generated_tokens": len(result.token_ids),
        **{name: getattr(counters, name) for name in _COUNTED},
        "drafted_by": dict(counters.drafted_by),
        "accepted_by": dict(counters.accepted_by),
        "draft_failure": engine.draft_failure,
        "seed": seed,
        "place": engine.backend.capabilities.place or plan.device,
        "plan": plan.as_json(),
        "memory": {
            **memory_json(plan),
            "measured_peak_bytes": peak_resident_bytes(),
            "allocated_bytes": engine.memory_bytes(),
        },
    }
    if checked is not None:
        report["check"] = checked
    if result.spans:
        report["switching"] = {
            "spans": [dataclasses.asdict(span) for span in result.spans],
            "large_share": result.large_share,
            "switches": counters.switches,
            "caught_up_tokens": counters.caught_up_tokens,
            "catch_up_s": counters.catch_up_s,
            "models": models_text(result),
        }
    return report


def _summary(report: dict[str, Any]) -> str:
    counts = ", ".join(
        f"{name} {report['accepted_by'].get(name, 0)} of {drafted}"
        for name, drafted in report["drafted_by"].items()
    )
    sources = f", drafts accepted: {counts}" if counts else ""
    line = (
        f"{report['generated_tokens']} tokens, {report['tokens_per_s']:.1f} tokens/s, acceptance "
        f"length {report['acceptance_length']:.2f} (plain is 1.00){sources}, first token "
        f"after {report['time_to_first_token_s']:.2f} s, peak memory "
        f"{size_text(report['memory']['measured_peak_bytes'])}"
    )
    if report["finish_reason"] in ("length", "context_full"):
        limit = "--max-tokens" if report["finish_reason"] == "length" else "--ctx"
        line += f"; cut off by {limit}"
        if repeats(report["text"]):
            line += "\nit repeats itself: --dry-multiplier 0.8 or --temperature 0.8 writes on"
    if report["j_per_token"] is not None:
        line += f"; {report['j_per_token']:.2f} J a token ({report['energy_source']})"
    if report["changed_tokens"]:
        line += (
            f"\n--accept typical: {report['changed_tokens']} tokens are not the model's own picks"
        )
    contended = report["contended_rounds"] / max(1, report["rounds"])
    if contended >= _WORTH_TELLING:
        line += f"\nother programs kept cores busy: fewer threads in {contended:.0%} of the steps"
    if "switching" in report:
        line += f"\n{report['switching']['models']}"
    if (checked := report.get("check")) is None:
        return line
    # What a second, plain run of the same prompt says: the same text, and how much faster.
    if checked["identical"]:
        line += f"\ncheck: identical to plain decoding ({checked['compared_tokens']} tokens)"
    else:
        line += (
            f"\ncheck: differs from plain decoding at token {checked['position']}, where the two "
            f"best logits are {checked['best_two_logits_gap']:.3f} apart (batch noise here: "
            f"{checked['batch_noise']:.3f})"
        )
    if plain := checked["plain_tokens_per_s"]:  # an answer of one token has no speed
        line += (
            f"\n{report['tokens_per_s'] / plain:.1f}x of plain decoding: "
            f"{report['accepted_tokens']} of {report['generated_tokens']} tokens were drafted"
        )
    return line
