"""A page in the browser: baseline, a recipe and fewer steps side by side, from one seed on one model."""

import math
import socket
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple, get_args

import gradio as gr
from PIL import Image
from rich.console import Console

from agentsd.recipe import MODES

from ..errors import EvalError
from ..images.choice import LABELS, STEPS, defaults_of, python_of, recipe_from
from ..images.methods import Method
from ..images.models import load_pipeline, scheduler_like
from ..images.prompts import ImageSpec, prompts_of, unknown_words
from ..images.sampling import sample, size_of, warm_up
from ..log import captured
from ..presets import load_settings
from ..quality.fidelity import psnr
from ..settings import AppSettings, Scheduler

_CHOSEN = "the recipe"
"""What its method is called: a mode's own name would stand for that mode as it is."""
_SHOWN = 512  # pixels on a side that a smaller image is enlarged to
_SAMPLED = ("seed", "width", "height", "steps", "guidance_scale", "scheduler")
_TITLE = "AgentSD for diffusers"
_THEME = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])
_CSS = ".note { border-left: 4px solid #c4600c; padding: .4em .8em } .figures td { padding-right: 1em }"


class Shown(NamedTuple):
    """What the page shows of one press of the button."""

    baseline: Image.Image
    own: Image.Image
    fewer: Image.Image
    """Of as many plain steps as take the recipe's time."""
    steps: int
    figures: str
    """HTML."""
    notes: list[str]


class Pairs:
    """Images made on one model, one at a time: the baseline's, a recipe's, and those of fewer steps."""

    def __init__(self, settings: AppSettings) -> None:
        """Load the model."""
        self.settings = settings
        self._pipe = load_pipeline(settings.model_copy(update={"scheduler": "model"}))
        scheduler_like(self._pipe.scheduler, settings.scheduler)  # where it can't be, the page would fail
        self._warm: set[tuple[int, int]] = set()
        self.device = self._pipe.unet.device
        self._clock = " in CPU time" if self.device.type == "cpu" else ""
        self.size = size_of(self._pipe, settings)

    def first_prompt(self) -> str:
        """Return the prompt that the page begins with."""
        return self.settings.prompt or prompts_of(self.settings.model, 1, 0)[0].prompt

    def make(self, prompt: str, mode: str, chosen: dict[str, Any], sampled: dict[str, Any]) -> Shown:
        """Return the three images with their figures, and what is to be said; EvalError for a bad setting."""
        if not prompt.strip():
            raise EvalError(f"prompt = {prompt!r}: write what the image is to show")
        given = {**self.settings.model_dump(exclude_unset=True), **sampled}
        settings = load_settings(AppSettings, None, given)
        spec, size = ImageSpec(0, prompt, settings.seed), size_of(self._pipe, settings)
        baseline = Method((), scheduler=settings.scheduler)
        try:
            recipe = recipe_from(mode, chosen)
            own = replace(baseline, parts=(_CHOSEN,), recipe=recipe)
            if size not in self._warm:
                warm_up(self._pipe, baseline, [spec], settings)
                self._warm.add(size)
            calls: list[str] = []
            with captured() as notes:
                [left], before = sample(self._pipe, baseline, [spec], settings)
                [right], after = sample(self._pipe, own, [spec], settings, calls.append)
                gain = before.charged(self.device) / after.charged(self.device)
                steps = max(1, round(settings.steps / max(gain, 1)))
                [plain], free = sample(self._pipe, replace(baseline, steps=steps), [spec], settings)
        except (TypeError, ValueError) as error:
            raise EvalError(str(error)) from None
        except RuntimeError as error:  # such as too little memory
            raise EvalError(f"{error}\nA smaller size needs less memory.") from error
        if settings.model == "demo" and (words := unknown_words(self._pipe.tokenizer, [prompt])):
            notes.append(f"the toy model was never taught {', '.join(map(repr, words))}")
        if recipe.residual is not None and "f" in calls[-1] and "attention" not in calls[-1]:
            notes.append(
                f"on this size {mode} is step caching alone; its cached steps approximate attention, too, "
                f"from {recipe.residual.least_tokens:,} tokens on (the toy model at 96 px, SD 1.5 at 384 px)"
            )
        rows = [
            ("baseline", f"{before.wall:.2f} s", "", ""),
            (mode, f"{after.wall:.2f} s", f"{gain:.2f}x as fast{self._clock}", _likeness(right, left)),
            (f"{steps} plain steps", f"{free.wall:.2f} s", "", _likeness(plain, left)),
        ]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        figures = (
            f"<table class=figures><tr>{'</tr><tr>'.join(cells)}</tr></table>"
            f"<p>One image is no measurement.</p><p>each step of {escape(mode)}: "
            f"<code class=calls>{escape(calls[-1])}</code></p>"
        )
        return Shown(left, right, plain, steps, figures, notes)


def command(settings: AppSettings, console: Console) -> None:
    """Serve the page until Ctrl-C."""
    check_address(settings.host, settings.port)
    page = build(Pairs(settings))
    _, address, _ = page.launch(
        server_name=settings.host,
        server_port=settings.port,
        share=False,
        quiet=True,
        prevent_thread_lock=True,
        footer_links=[],
        theme=_THEME,
        css=_CSS,
    )
    console.print(f"page: {address} (Ctrl-C ends it)", soft_wrap=True)
    page.block_thread()


def check_address(host: str, port: int | None) -> None:
    """Raise EvalError where the page can't be served."""
    try:
        socket.create_server((host, port or 0)).close()
    except OSError as error:
        raise EvalError(
            f"host {host!r}, port {port}: {error.strerror}; pass another --port, or --host 127.0.0.1, this "
            "machine alone"
        ) from None


def build(pairs: Pairs) -> gr.Blocks:
    """Return the page."""
    settings, (height, width) = pairs.settings, pairs.size
    samplers = list(get_args(Scheduler))
    with gr.Blocks(title=_TITLE, analytics_enabled=False) as page:
        model = "the toy model" if settings.model == "demo" else settings.model
        gr.Markdown(f"# {_TITLE}\nOne prompt and seed, with and without it: {model} on {pairs.device}.")
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                prompt = gr.Textbox(pairs.first_prompt(), label="prompt", lines=2)
                mode = gr.Radio(list(MODES), value=settings.recipe, label="mode")
                sides = [(f"{height * n // 2} px", height * n // 2) for n in (2, 3, 4)]
                size = gr.Radio(sides, value=height, label="size", visible=height == width)
                button = gr.Button("Make the images", variant="primary")
                with gr.Accordion("Sampling", open=False), gr.Row():
                    whole = {"seed": settings.seed, "width": width, "height": height, "steps": settings.steps}
                    inputs: list[Any] = [
                        *(gr.Number(n, label=name, precision=0, min_width=110) for name, n in whole.items()),
                        gr.Number(settings.guidance_scale, label="guidance", min_width=110),
                        gr.Dropdown(samplers, value=settings.scheduler, label="sampler", min_width=200),
                    ]
                with gr.Accordion("Recipe", open=False), gr.Row():
                    numbers = [gr.Number(min_width=200, **_shown(settings.recipe, name)) for name in LABELS]
            with gr.Column(scale=3, min_width=300):
                note = gr.HTML(visible=False)
                label = "left: baseline, right: the mode"
                kept: Any = {"format": "png", "interactive": False, "buttons": ["fullscreen"]}
                slider = gr.ImageSlider(label=label, **kept)
                plain = gr.ImageSlider(label="left: baseline, right: fewer steps", **kept)
                figures = gr.HTML()
                line = gr.Code(
                    python_of(settings.recipe, {}), "python", lines=3, label="the same in Python",
                    interactive=False, buttons=["copy"],
                )  # fmt: skip

        def show(mode: str) -> list[Any]:
            return [gr.Number(**_shown(mode, name)) for name in LABELS]

        def say(mode: str, *values: Any) -> str:
            try:
                return python_of(mode, dict(zip(LABELS, values, strict=True)))
            except (TypeError, ValueError) as error:
                return f"# {error}"

        def run(prompt: str, mode: str, *values: Any) -> Iterator[dict[Any, Any]]:
            sampled = dict(zip(_SAMPLED, values, strict=False))
            chosen = dict(zip(LABELS, values[len(_SAMPLED) :], strict=True))
            yield {note: _note([]), slider: None, plain: None, figures: ""}
            try:
                shown = pairs.make(prompt, mode, chosen, sampled)
            except EvalError as error:
                yield {note: _note([str(error)])}
                return
            left, right, fewer = map(_enlarged, shown[:3])
            told = f"left: baseline, right: {shown.steps} plain steps, which take about as long"
            yield {
                note: _note(shown.notes),
                slider: gr.ImageSlider((left, right), label=f"left: baseline, right: {mode}"),
                plain: gr.ImageSlider((left, fewer), label=told),
                figures: shown.figures,
            }

        asked = [mode, *numbers]
        shown = mode.input(show, mode, numbers, show_progress="hidden")
        shown.then(say, asked, line, show_progress="hidden")
        gr.on([part.change for part in asked], say, asked, line, show_progress="hidden")
        asked = [prompt, mode, *inputs, *numbers]
        gr.on([button.click, prompt.submit], run, asked, [note, slider, plain, figures])
        size.input(lambda side: [side, side], size, inputs[1:3], show_progress="hidden")
    return page


def _likeness(image: Image.Image, baseline: Image.Image) -> str:
    near = psnr(image, baseline)
    return "the same image" if near == math.inf else f"{near:.1f} dB PSNR to the baseline"


def _note(lines: list[str]) -> Any:
    text = "<br>".join(escape(line).replace("\n", "<br>") for line in lines)
    return gr.HTML(f'<div class="note" role="alert">{text}</div>', visible=bool(lines))


def _shown(mode: str, name: str) -> dict[str, Any]:
    """How a setting is shown: where the recipe has it, with its value."""
    defaults = defaults_of(mode)
    own = {"value": defaults.get(name), "visible": name in defaults}
    return own | {"label": LABELS[name], "precision": 0 if name in STEPS else None}


def _enlarged(image: Image.Image) -> Image.Image:
    factor = max(1, _SHOWN // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC)
