"""A page in the browser: baseline and a recipe side by side, from one seed on one model."""

import errno
import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, get_args

import gradio as gr
import torch
from PIL import Image
from pydantic import ValidationError
from rich.console import Console

from agentsd.recipe import MODES

from ..errors import EvalError
from ..images.choice import LABELS, STEPS, defaults_of, python_of, recipe_from
from ..images.methods import Method
from ..images.models import load_pipeline, set_scheduler
from ..images.prompts import ImageSpec, unknown_words
from ..images.sampling import Seconds, sample, size_of, warm_up
from ..log import captured
from ..pages.strip import strip_of
from ..quality.fidelity import psnr
from ..settings import AppSettings, Scheduler

BASELINE = Method(())
_CHOSEN = "the recipe"
"""What its method is called: a mode's own name would stand for that mode as it is."""
_SHOWN = 512  # pixels on a side that a smaller image is enlarged to
_PORTS = range(7860, 7960)
_SAMPLED = ("seed", "width", "height", "steps", "guidance_scale", "scheduler")
_TITLE = "AgentSD for diffusers"
_THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
_CSS = ".note { border-left: 4px solid #c4600c; padding: .4em .8em }"


@dataclass(frozen=True)
class Pair:
    """The baseline's image and the recipe's, with what each took, and what is to be said of the run."""

    images: tuple[Image.Image, Image.Image]
    seconds: tuple[Seconds, Seconds]
    calls: str
    notes: list[str]


class Pairs:
    """Pairs of images made on one model, one at a time."""

    def __init__(self, settings: AppSettings) -> None:
        """Load the model."""
        self.settings = settings
        self._pipe = load_pipeline(settings.model_copy(update={"scheduler": "model"}))
        self._scheduler = self._pipe.scheduler
        self._warm: set[tuple[int, int]] = set()
        self.device = self._pipe.unet.device
        self.size = size_of(self._pipe, settings)

    def first_prompt(self) -> str:
        """Return the prompt that the page begins with."""
        if self.settings.prompt is not None or self.settings.model != "demo":
            return self.settings.prompt or "a photograph of a fox in the snow"
        from agentsd_demo.scenes import triples

        return triples()[0].caption

    def make(self, prompt: str, mode: str, chosen: dict[str, Any], sampled: dict[str, Any]) -> Pair:
        """Return a pair; raises EvalError for a bad setting."""
        if not prompt.strip():
            raise EvalError(f"prompt = {prompt!r}: write what the image is to show")
        try:
            settings = AppSettings.model_validate({**self.settings.model_dump(), **sampled})
            method = Method((_CHOSEN,), recipe=recipe_from(mode, chosen))
        except ValidationError as error:
            wrong = [f"{one['loc'][0]} = {one['input']!r}: {one['msg']}" for one in error.errors()]
            raise EvalError("\n".join(wrong)) from None
        except (TypeError, ValueError) as error:
            raise EvalError(str(error)) from None
        self._pipe.scheduler = self._scheduler
        set_scheduler(self._pipe, settings.scheduler)
        try:
            return self._sampled(method, ImageSpec(0, prompt, settings.seed), settings)
        except RuntimeError as error:  # such as too little memory
            size = " x ".join(map(str, size_of(self._pipe, settings)))
            raise EvalError(f"{size} px: {error}\nA smaller size needs less memory.") from error

    def _sampled(self, method: Method, spec: ImageSpec, settings: AppSettings) -> Pair:
        summaries = ["no call yet"]
        if (size := size_of(self._pipe, settings)) not in self._warm:
            warm_up(self._pipe, BASELINE, [spec], settings)
            self._warm.add(size)
        with captured() as notes:
            [baseline], baseline_seconds = sample(self._pipe, BASELINE, [spec], settings)
            [own], own_seconds = sample(self._pipe, method, [spec], settings, summaries.append)
        if settings.model == "demo" and (words := unknown_words(self._pipe.tokenizer, [spec.prompt])):
            notes.append(f"the toy model was never taught {', '.join(map(repr, words))}")
        return Pair((baseline, own), (baseline_seconds, own_seconds), summaries[-1], notes)


def command(settings: AppSettings, console: Console) -> None:
    """Serve the page until Ctrl-C."""
    port = free_port(settings.host, settings.port)
    page = build(Pairs(settings))
    _, address, _ = page.launch(
        server_name=settings.host,
        server_port=port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        theme=_THEME,
        css=_CSS,
    )
    console.print(f"page: {address} (Ctrl-C ends it)", soft_wrap=True)
    page.block_thread()


def free_port(host: str, port: int | None) -> int:
    """Return that port, or the first free one; raises EvalError where the page can't be served."""
    for tried in _PORTS if port is None else [port]:
        try:
            with socket.create_server((host, tried)):
                return tried
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise EvalError(f"host {host!r}: {error.strerror}; 127.0.0.1 is this machine alone") from None
    raise EvalError(f"port {port or _PORTS} of {host} is taken: pass another --port")


def build(pairs: Pairs) -> gr.Blocks:
    """Return the page."""
    settings = pairs.settings
    height, width = pairs.size
    with gr.Blocks(title=_TITLE, analytics_enabled=False) as page:
        model = "the toy model" if settings.model == "demo" else settings.model
        gr.Markdown(f"# {_TITLE}\nOne prompt and seed, with and without it: {model} on {pairs.device}.")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                prompt = gr.Textbox(pairs.first_prompt(), label="prompt", lines=2)
                mode = gr.Radio(list(MODES), value=settings.recipe, label="mode")
                button = gr.Button("Make both images", variant="primary")
                with gr.Accordion("Sampling", open=False), gr.Row():
                    whole = {"precision": 0, "min_width": 110}
                    inputs = [
                        gr.Number(settings.seed, label="seed", **whole),
                        gr.Number(width, label="width", **whole),
                        gr.Number(height, label="height", **whole),
                        gr.Number(settings.steps, label="steps", **whole),
                        gr.Number(settings.guidance_scale, label="guidance", min_width=110),
                        gr.Dropdown(
                            list(get_args(Scheduler)),
                            value=settings.scheduler,
                            label="sampler",
                            min_width=200,
                        ),
                    ]
                with gr.Accordion("Recipe", open=False), gr.Row():
                    numbers = [
                        gr.Number(
                            label=label,
                            precision=0 if name in STEPS else None,
                            min_width=200,
                            **_shown(settings.recipe, name),
                        )
                        for name, label in LABELS.items()
                    ]
            with gr.Column(scale=3, min_width=300):
                note = gr.HTML(visible=False)
                slider = gr.ImageSlider(
                    label="left: baseline, right: AgentSD",
                    format="png",
                    interactive=False,
                    buttons=["fullscreen"],
                )
                figures = gr.HTML()
                line = gr.Code(
                    python_of(settings.recipe, {}),
                    language="python",
                    label="the same in Python",
                    interactive=False,
                    lines=3,
                    buttons=["copy"],
                )

        def show(mode: str) -> list[Any]:
            return [gr.Number(**_shown(mode, name)) for name in LABELS]

        def say(mode: str, *values: Any) -> str:
            return python_of(mode, dict(zip(LABELS, values, strict=True)))

        def run(prompt: str, mode: str, *values: Any) -> Iterator[dict[Any, Any]]:
            sampled = dict(zip(_SAMPLED, values, strict=False))
            chosen = dict(zip(LABELS, values[len(_SAMPLED) :], strict=True))
            yield {note: _note([]), slider: None, figures: ""}
            try:
                pair = pairs.make(prompt, mode, chosen, sampled)
            except EvalError as error:
                yield {note: _note([str(error)])}
                return
            yield {
                note: _note(pair.notes),
                slider: tuple(map(_enlarged, pair.images)),
                figures: figures_of(pair, mode, pairs.device),
            }

        asked = [mode, *numbers]
        shown = mode.input(show, mode, numbers, show_progress="hidden")
        shown.then(say, asked, line, show_progress="hidden")
        gr.on([part.change for part in asked], say, asked, line, show_progress="hidden")
        gr.on(
            [button.click, prompt.submit],
            run,
            [prompt, mode, *inputs, *numbers],
            [note, slider, figures],
        )
    return page


def figures_of(pair: Pair, mode: str, device: torch.device) -> str:
    """Return the seconds, the gain, the difference, and what each call was, as HTML."""
    baseline, own = pair.seconds
    gain = baseline.charged(device) / own.charged(device)
    clock = " in CPU time" if device.type == "cpu" else ""
    near = psnr(*reversed(pair.images))
    loss = "the same image" if near == math.inf else f"{near:.1f} dB PSNR to the baseline"
    return (
        f"<p>baseline <b>{baseline.wall:.2f} s</b>, {escape(mode)} <b>{own.wall:.2f} s</b>: {gain:.2f}x as "
        f"fast{clock}, {loss}. One image is no measurement.</p>{strip_of(pair.calls)}"
    )


def _note(lines: list[str]) -> Any:
    text = "<br>".join(escape(line).replace("\n", "<br>") for line in lines)
    return gr.HTML(f'<div class="note" role="alert">{text}</div>', visible=bool(lines))


def _shown(mode: str, name: str) -> dict[str, Any]:
    """Whether a setting is seen, and with which value: where the recipe has it."""
    defaults = defaults_of(mode)
    return {"value": defaults.get(name), "visible": name in defaults}


def _enlarged(image: Image.Image) -> Image.Image:
    factor = max(1, _SHOWN // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC)
