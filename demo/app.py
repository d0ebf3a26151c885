"""A page in the browser: baseline, a mode and fewer steps side by side, from one seed on one model.

pip install 'gradio>=6'
python demo/app.py --model FOLDER_OR_HUB_ID --dtype float16
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from typing import Any, get_args

import gradio as gr
from agentsd_eval.errors import EvalError
from agentsd_eval.images.methods import Method
from agentsd_eval.images.models import load_pipeline, scheduler_like
from agentsd_eval.images.prompts import ImageSpec, prompts_of, unknown_words
from agentsd_eval.images.sampling import sample, size_of, warm_up
from agentsd_eval.log import captured
from agentsd_eval.presets import load_settings
from agentsd_eval.quality.fidelity import psnr
from agentsd_eval.settings import SamplingSettings, Scheduler
from PIL import Image

from agentsd.recipe import MODES

_SHOWN = 512  # pixels on a side that a smaller image is enlarged to
_SAMPLED = ("seed", "width", "height", "steps", "guidance_scale", "scheduler")
_CSS = ".note { border-left: 4px solid #c4600c; padding: .4em .8em } .figures td { padding-right: 1em }"


class Pairs:
    """Images made on one model, one at a time: the baseline's, a mode's, and those of fewer steps.

    Args:
        settings: how they are made, where the page says nothing else.

    Raises:
        EvalError: the model can't be loaded, or run under the scheduler.
    """

    def __init__(self, settings: SamplingSettings) -> None:
        self.settings = settings
        self._pipe = load_pipeline(settings.model_copy(update={"scheduler": "model"}))
        scheduler_like(self._pipe.scheduler, settings.scheduler)  # where it can't be, the page would fail
        self._warm: set[tuple[int, int]] = set()
        self.device = self._pipe.unet.device
        self.size = size_of(self._pipe, settings)

    def make(
        self, prompt: str, mode: str, sampled: dict[str, Any]
    ) -> tuple[list[Image.Image], int, str, list[str]]:
        """The three images, the plain steps that take the mode's time, figures in HTML, and remarks.

        Raises:
            EvalError: for a bad setting, or too little memory.
        """
        if not prompt.strip():
            raise EvalError(f"prompt = {prompt!r}: write what the image is to show")
        given = {**self.settings.model_dump(exclude_unset=True), **sampled}
        settings = load_settings(SamplingSettings, None, given)
        spec, size = ImageSpec(0, prompt, settings.seed), size_of(self._pipe, settings)
        baseline = Method((), scheduler=settings.scheduler)
        own = replace(baseline, parts=("the mode",), recipe=MODES[mode])
        calls: list[str] = []
        try:
            if size not in self._warm:
                warm_up(self._pipe, baseline, [spec], settings)
                self._warm.add(size)
            with captured() as notes:
                [left], before = sample(self._pipe, baseline, [spec], settings)
                [right], after = sample(self._pipe, own, [spec], settings, calls.append)
                gain = before.charged(self.device) / after.charged(self.device)
                steps = max(1, round(settings.steps / max(gain, 1)))
                [plain], free = sample(self._pipe, replace(baseline, steps=steps), [spec], settings)
        except RuntimeError as error:
            raise EvalError(f"{error}\nA smaller size needs less memory.") from error
        if settings.model == "demo" and (words := unknown_words(self._pipe.tokenizer, [prompt])):
            notes.append(f"the toy model was never taught {', '.join(map(repr, words))}")
        clock = " in CPU time" if self.device.type == "cpu" else ""
        rows = [
            ("baseline", f"{before.wall:.2f} s", "", ""),
            (mode, f"{after.wall:.2f} s", f"{gain:.2f}x as fast{clock}", _likeness(right, left)),
            (f"{steps} plain steps", f"{free.wall:.2f} s", "", _likeness(plain, left)),
        ]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        figures = (
            f"<table class=figures><tr>{'</tr><tr>'.join(cells)}</tr></table>"
            f"<p>One image is no measurement.</p><p>each step of {escape(mode)}: "
            f"<code class=calls>{escape(calls[-1])}</code></p>"
        )
        return [left, right, plain], steps, figures, notes


def build(pairs: Pairs) -> gr.Blocks:
    """The page."""
    settings, (height, width) = pairs.settings, pairs.size
    with gr.Blocks(title="AgentSD for diffusers", analytics_enabled=False) as page:
        model = "the toy model" if settings.model == "demo" else settings.model
        gr.Markdown(
            f"# AgentSD for diffusers\nOne prompt and seed, with it and without: {model} on {pairs.device}."
        )
        with gr.Row():
            with gr.Column(scale=2, min_width=300):
                prompt = gr.Textbox(prompts_of(settings.model, 1, 0)[0].prompt, label="prompt", lines=2)
                mode = gr.Radio(list(MODES), value="fast", label="mode")
                button = gr.Button("Make the images", variant="primary")
                with gr.Accordion("Sampling", open=False), gr.Row():
                    whole = {"seed": settings.seed, "width": width, "height": height, "steps": settings.steps}
                    inputs: list[Any] = [
                        *(gr.Number(n, label=name, precision=0, min_width=110) for name, n in whole.items()),
                        gr.Number(settings.guidance_scale, label="guidance", min_width=110),
                        gr.Dropdown(list(get_args(Scheduler)), value=settings.scheduler, label="sampler"),
                    ]
            with gr.Column(scale=3, min_width=300):
                note = gr.HTML(visible=False)
                kept: Any = {"format": "png", "interactive": False, "buttons": ["fullscreen"]}
                slider = gr.ImageSlider(label="left: baseline, right: the mode", **kept)
                plain = gr.ImageSlider(label="left: baseline, right: fewer steps", **kept)
                figures = gr.HTML()

        def run(prompt: str, mode: str, *values: Any) -> Iterator[dict[Any, Any]]:
            yield {note: _note([]), slider: None, plain: None, figures: ""}
            try:
                images, steps, told, notes = pairs.make(
                    prompt, mode, dict(zip(_SAMPLED, values, strict=True))
                )
            except EvalError as error:
                yield {note: _note([str(error)])}
                return
            left, right, fewer = map(_enlarged, images)
            label = f"left: baseline, right: {steps} plain steps, which take about as long"
            yield {
                note: _note(notes),
                slider: gr.ImageSlider((left, right), label=f"left: baseline, right: {mode}"),
                plain: gr.ImageSlider((left, fewer), label=label),
                figures: told,
            }

        gr.on([button.click, prompt.submit], run, [prompt, mode, *inputs], [note, slider, plain, figures])
    return page


def _likeness(image: Image.Image, baseline: Image.Image) -> str:
    near = psnr(image, baseline)
    return "the same image" if near == math.inf else f"{near:.1f} dB PSNR to the baseline"


def _note(lines: list[str]) -> Any:
    text = "<br>".join(escape(line).replace("\n", "<br>") for line in lines)
    return gr.HTML(f'<div class="note" role="alert">{text}</div>', visible=bool(lines))


def _enlarged(image: Image.Image) -> Image.Image:
    factor = max(1, _SHOWN // max(image.size))
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.BICUBIC)


def main() -> None:
    """Serve the page until Ctrl-C."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="demo", help="demo (the toy model), a folder, or a hub id [demo]")
    for name in ("dtype", "device", "scheduler", "steps"):
        parser.add_argument(f"--{name}", help="as in agentsd-eval compare")
    parser.add_argument("--host", default="127.0.0.1", help="address; 0.0.0.0 is every network [127.0.0.1]")
    parser.add_argument("--port", type=int, help="port; else the first free one from 7860 on")
    given = {name: value for name, value in vars(parser.parse_args()).items() if value is not None}
    host, port = given.pop("host"), given.pop("port", None)
    try:
        page = build(Pairs(load_settings(SamplingSettings, None, given)))
    except EvalError as error:
        parser.error(str(error))
    page.launch(server_name=host, server_port=port, share=False, footer_links=[], css=_CSS)


if __name__ == "__main__":
    main()
