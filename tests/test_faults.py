"""Faults that were found and mended, each as a test that the old code fails."""

import gc
import io
import pickle
import threading
import warnings
import weakref

import accelerate
import diffusers
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from tiny import BETAS, WIDTH, call, make_controlnet, make_motion_adapter, make_unet, snapshot, watch_phases

from agentsd import Agents, ByDistance, Merge, Phases, PooledAgents, Recipe, apply_agentsd, remove_agentsd
from agentsd.attention.processor import is_ours
from agentsd.modules import AgentModule, FocusedLinear
from agentsd.recipe import FAST

TRAINED = Recipe(AgentModule())


def inputs(seed=0, batch=2):
    """A latent, a text and a timestep for `make_unet`."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 4, 16, 16, generator=rng), torch.randn(batch, 7, WIDTH, generator=rng)


def denoise(unet, scheduler, steps=5, batch=2, **also):
    """A run of a bare U-Net: the last latents."""
    latent, text = inputs(batch=batch)
    scheduler.set_timesteps(steps)
    with torch.no_grad():
        for t in scheduler.timesteps:
            noise = unet(scheduler.scale_model_input(latent, t), t, text, **also).sample
            latent = scheduler.step(noise, t, latent).prev_sample
    return latent


@pytest.fixture
def no_warning():
    """Let a warning of agentsd's be an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="agentsd")
        yield


# A trained module is made for the model's own size


@pytest.mark.parametrize("make", [make_controlnet, lambda: make_unet(sample_size=None)])
def test_a_trained_module_needs_the_models_size(make):
    model = make()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"sample_size=None: \w+ does not say its size.*register_to_config"):
        apply_agentsd(model, recipe=TRAINED)
    assert snapshot(model) == before
    assert len(apply_agentsd(model).layer_names) >= 2
    with pytest.raises(ValueError, match="sample_size=None"):
        apply_agentsd(model, recipe=TRAINED)
    assert model._agentsd.recipe == FAST  # the patch that was there
    model.register_to_config(sample_size=16)  # the way out
    assert len(apply_agentsd(model, recipe=TRAINED).parameters()) > 2


# Gradient checkpointing computes the layers of a call again


def training_unet(checkpointing, recipe=FAST):
    unet = make_unet().train()
    apply_agentsd(unet, recipe=recipe)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    return unet


def forward(unet, seed, t=999):
    latent, text = inputs(seed)
    return unet(latent, torch.tensor([t, t]), text).sample.square().mean()


def grads(unet):
    return [p.grad.clone() for p in unet.parameters() if p.grad is not None]


def test_a_second_forward_before_the_backward_is_refused_under_checkpointing():
    expected, unet = training_unet(True), training_unet(True)
    forward(expected, 0).backward()
    first = forward(unet, 0)
    with pytest.raises(RuntimeError, match=r"a second forward before the backward.*backward\(\) after each"):
        forward(unet, 1)
    first.backward()
    assert all(torch.equal(a, b) for a, b in zip(grads(expected), grads(unet), strict=True))
    dropped = forward(unet, 1)
    del dropped
    gc.collect()
    forward(unet, 1)  # nothing waits any more

    plain = training_unet(False)
    (forward(plain, 0) + forward(plain, 1)).backward()  # nothing is computed again


@pytest.mark.parametrize("t", [999, 1])
def test_a_call_without_gradients_between_forward_and_backward_changes_no_gradient(t):
    expected, unet = training_unet(True), training_unet(True)
    forward(expected, 0, t).backward()
    loss = forward(unet, 0, t)
    with torch.no_grad():
        for other in (999, 1):
            forward(unet, 1, other)
    loss.backward()
    assert grads(unet)
    assert all(torch.equal(a, b) for a, b in zip(grads(expected), grads(unet), strict=True))


def test_forward_and_backward_by_turns():
    found = []
    for checkpointing in (False, True):
        unet = training_unet(checkpointing)
        for seed, t in enumerate((999, 1, 500, 999)):
            forward(unet, seed, t).backward()
        found.append(grads(unet))
    assert found[0]
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(plain, again, rtol=0, atol=1e-6)


# Threads


def in_a_thread(work):
    """What a function returns or raises in a thread of its own."""
    outcome = []

    def run():
        try:
            outcome.append(work())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return outcome[0]


def test_a_second_thread_inside_a_call_is_refused():
    unet = make_unet()
    apply_agentsd(unet)
    alone, other = call(unet), []

    def intrude(*_):
        hook.remove()
        other.append(in_a_thread(lambda: call(unet, 1)))

    hook = unet.mid_block.register_forward_pre_hook(intrude)
    assert torch.equal(call(unet), alone)
    assert isinstance(other[0], RuntimeError)
    assert "in a call of another thread" in str(other[0])
    assert "copy.deepcopy" in str(other[0])
    assert torch.equal(in_a_thread(lambda: call(unet)), alone)


def test_a_thread_that_died_in_a_call_locks_nobody_out():
    unet = make_unet()
    apply_agentsd(unet)
    alone = call(unet)
    hook = unet.mid_block.register_forward_pre_hook(lambda *_: 1 / 0)
    assert isinstance(in_a_thread(lambda: call(unet)), ZeroDivisionError)
    hook.remove()
    assert torch.equal(call(unet), alone)


@pytest.mark.parametrize("recipe", [FAST, Recipe(ByDistance((Agents(), None), (0.9,)))])
def test_threads_that_take_turns_each_get_their_own_picture(make_pipeline, recipe):
    """Two pipelines share a U-Net and change over after every step."""
    pipe = make_pipeline()
    other = make_pipeline(unet=pipe.unet, scheduler=diffusers.EulerDiscreteScheduler(**BETAS))
    jobs = [(pipe, 5), (other, 8)]
    apply_agentsd(pipe, recipe=recipe)

    def picture(job, **more):
        pipe, steps = job
        rng = torch.Generator().manual_seed(0)
        return pipe("a cat", num_inference_steps=steps, output_type="latent", generator=rng, **more).images

    alone = [picture(job) for job in jobs]
    turns, done, made = [threading.Semaphore(1), threading.Semaphore(0)], [False, False], {}

    def work(me):
        def change_over(pipe, step, t, tensors):
            if not done[1 - me]:
                turns[1 - me].release()
                assert turns[me].acquire(timeout=60)
            return tensors

        assert turns[me].acquire(timeout=60)
        try:
            made[me] = picture(jobs[me], callback_on_step_end=change_over)
        finally:
            done[me] = True
            turns[1 - me].release()

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for me in (0, 1):
        assert torch.equal(made[me], alone[me])


# Hosts that set or look up processors by their class


def test_the_default_processors_can_be_set_while_patched(pipe, sample):
    stock = sample(pipe)
    apply_agentsd(pipe)
    patched = sample(pipe)
    pipe.unet.set_default_attn_processor()
    torch.testing.assert_close(sample(pipe), patched, rtol=0, atol=1e-4)
    assert any(is_ours(p) for p in pipe.unet.attn_processors.values())
    remove_agentsd(pipe)
    assert not any(is_ours(p) for p in pipe.unet.attn_processors.values())
    torch.testing.assert_close(sample(pipe), stock, rtol=0, atol=1e-4)


def test_hooks_find_a_patched_processor_by_its_class():
    hooks = pytest.importorskip("diffusers.hooks._helpers", reason="this diffusers has no such hooks")
    unet = make_unet()
    known = {
        name: hooks.AttentionProcessorRegistry.get(p.__class__) for name, p in unet.attn_processors.items()
    }
    apply_agentsd(unet)
    for name, processor in unet.attn_processors.items():
        assert hooks.AttentionProcessorRegistry.get(processor.__class__) is known[name]


# Where weights are stored otherwise than they are computed


@pytest.mark.parametrize("storage", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("recipe", [TRAINED, Recipe(FocusedLinear())])
def test_a_trained_module_has_the_dtype_of_computing_under_layerwise_casting(recipe, storage):
    unet = make_unet()
    unet.enable_layerwise_casting(storage_dtype=storage, compute_dtype=torch.float32)
    handle = apply_agentsd(unet, recipe=recipe)
    assert {p.dtype for core in handle._cores for p in core.parameters()} == {torch.float32}
    assert call(unet).isfinite().all()


def test_a_trained_module_is_refused_where_weights_are_elsewhere():
    first, later = make_unet(), make_unet()
    apply_agentsd(first, recipe=TRAINED)
    expected = call(first)
    accelerate.cpu_offload(first, execution_device=torch.device("cpu"))  # the way out
    assert torch.equal(call(first), expected)

    accelerate.cpu_offload(later, execution_device=torch.device("cpu"))
    before = snapshot(later)
    with pytest.raises(ValueError, match=r"device 'meta'.*before pipe.enable_sequential_cpu_offload\(\)"):
        apply_agentsd(later, recipe=TRAINED)
    assert snapshot(later) == before


# The run that calls is the one that is followed


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (diffusers.DDIMScheduler, {}),
        (diffusers.DPMSolverMultistepScheduler, {"use_karras_sigmas": True}),
        (diffusers.EulerDiscreteScheduler, {"timestep_type": "continuous", "use_karras_sigmas": True}),
        (diffusers.EulerDiscreteScheduler, {"timestep_spacing": "trailing"}),
        (diffusers.LCMScheduler, {}),
    ],
)
@pytest.mark.usefixtures("no_warning")
def test_a_bare_unet_has_the_phases_of_its_pipeline(make_pipeline, kind, options):
    seen = []
    if options.get("timestep_type") == "continuous":
        options = options | {"prediction_type": "v_prediction", "sigma_min": 0.02, "sigma_max": 14.0}
    for bare in (False, True):
        scheduler = kind(**BETAS, **options)
        pipe = make_pipeline(scheduler=scheduler)
        handle = apply_agentsd(pipe.unet if bare else pipe)
        phases = watch_phases(handle)
        seen.append((denoise(pipe.unet, scheduler, 10), phases))
    (of_pipe, phases), (of_bare, bare_phases) = seen
    assert phases == bare_phases
    assert set(map(tuple, phases.values())) == {("agent",) * 4 + ("downsample",) * 6}
    assert torch.equal(of_pipe, of_bare)


def test_a_pipeline_that_shares_the_unet_is_followed_by_its_own_scheduler(make_pipeline, sample):
    pipe = make_pipeline(scheduler=diffusers.DDIMScheduler(**BETAS))
    other = diffusers.AutoPipelineForText2Image.from_pipe(pipe)
    other.scheduler = diffusers.EulerDiscreteScheduler(
        **BETAS, timestep_type="continuous", prediction_type="v_prediction"
    )
    assert other.unet is pipe.unet
    phases = watch_phases(apply_agentsd(pipe))
    seen = phases[next(iter(phases))]
    sample(pipe, num_inference_steps=10)
    assert seen == ["agent"] * 4 + ["downsample"] * 6
    seen.clear()
    sample(other, num_inference_steps=5)
    assert seen == ["agent"] * 2 + ["downsample"] * 3
    seen.clear()
    sample(pipe, num_inference_steps=20)
    assert seen == ["agent"] * 8 + ["downsample"] * 12


def test_a_timestep_off_every_list_is_told_once(pipe):
    apply_agentsd(pipe)
    pipe.scheduler.set_timesteps(5)
    with pytest.warns(UserWarning, match="agentsd: timestep 555 is not one of the scheduler's"):
        call(pipe.unet, 555)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(pipe.unet, 555)


# A file that cannot be used changes nothing


def _cut(path):
    path.write_bytes(path.read_bytes()[:100])


def _spoil(change):
    def spoil(path):
        weights = load_file(path)
        name = sorted(weights)[0]
        save_file(change(weights, name), path)

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_cut, "cannot be read .*save it again"),
        (lambda path: path.write_bytes(b""), "cannot be read .*save it again"),
        (_spoil(lambda w, n: w | {n: torch.full_like(w[n], torch.nan)}), "is not finite: save it again"),
        (_spoil(lambda w, n: w | {n: w[n] / 0}), "is not finite: save it again"),
        (_spoil(lambda w, n: w | {n: w[n].int()}), "is torch.int32: save it again"),
        (_spoil(lambda w, n: w | {n: w[n][:1].clone()}), "does not fit this model"),
        (_spoil(lambda w, n: {k: v for k, v in w.items() if k != n}), "does not fit this model"),
        (_spoil(lambda w, n: w | {"more": w[n].clone()}), "does not fit this model"),
    ],
)
def test_weights_that_cannot_be_used_leave_the_patch_in_force(pipe, sample, tmp_path, spoil, message):
    with apply_agentsd(pipe, recipe=TRAINED) as trained:
        trained.save(tmp_path)
    before = [p.clone() for p in pipe.unet.parameters()]
    handle = apply_agentsd(pipe)
    picture = sample(pipe)
    spoil(tmp_path / "agentsd.safetensors")
    with pytest.raises(ValueError, match=message):
        apply_agentsd(pipe, recipe=tmp_path)
    assert pipe.unet._agentsd is handle
    assert torch.equal(sample(pipe), picture)
    assert all(torch.equal(a, b) for a, b in zip(before, pipe.unet.parameters(), strict=True))


# A LoRA that is fused while other weights are loaded


def trained_folder(tmp_path):
    """A recipe with weights that are not the base model's."""
    unet = make_unet()
    handle = apply_agentsd(unet, recipe=TRAINED)
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=rng))
    handle.save(tmp_path)
    return tmp_path


def load_lora(pipe):
    config = LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    torch.manual_seed(4)
    pipe.unet.add_adapter(config, adapter_name="style")


STEPS = {
    "apply": lambda p, folder: apply_agentsd(p, recipe=folder),
    "load": lambda p, folder: load_lora(p),
    "fuse": lambda p, folder: p.fuse_lora(),
    "remove": lambda p, folder: remove_agentsd(p),
    "unfuse": lambda p, folder: p.unfuse_lora(),
    "unload": lambda p, folder: p.unload_lora_weights(),
}


@pytest.mark.parametrize(
    "order",
    [
        "apply load fuse remove unfuse unload",
        "load apply fuse remove unfuse unload",
        "load apply fuse unfuse remove unload",
        "load fuse apply remove unfuse unload",
        "load fuse apply unfuse remove unload",
    ],
)
def test_a_lora_and_loaded_weights_leave_the_base_weights(pipe, sample, tmp_path, order):
    folder = trained_folder(tmp_path)
    base, stock = {k: v.clone() for k, v in pipe.unet.state_dict().items()}, sample(pipe)
    for step in order.split():
        STEPS[step](pipe, folder)
    after = pipe.unet.state_dict()
    assert after.keys() == base.keys()
    for name, weight in base.items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-6)
    torch.testing.assert_close(sample(pipe), stock, rtol=0, atol=1e-3)


def test_a_fused_lora_acts_after_the_removal(pipe, make_pipeline, sample, tmp_path):
    twin = make_pipeline()
    load_lora(twin)
    twin.fuse_lora()
    apply_agentsd(pipe, recipe=trained_folder(tmp_path))
    load_lora(pipe)
    pipe.fuse_lora()
    remove_agentsd(pipe)
    torch.testing.assert_close(sample(pipe), sample(twin), rtol=0, atol=1e-3)


# Runs whose timesteps do not fall


SHORT = Recipe(ByDistance((PooledAgents(4), None), (1000.0,)))
"""Agents in the first call alone, and in the first after a run is taken for a new one."""


RISING = [
    (diffusers.DDIMInverseScheduler, {}),
    (diffusers.KDPM2AncestralDiscreteScheduler, {"use_karras_sigmas": True}),
]


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize(("kind", "options"), RISING)
def test_no_false_word_of_a_missing_early_step(make_pipeline, sample, kind, options):
    pipe = make_pipeline(scheduler=kind(**BETAS, **options))
    steps = []
    pipe.unet.register_forward_pre_hook(lambda module, args: steps.append(float(args[1])))
    phases = watch_phases(apply_agentsd(pipe))
    for _ in range(2):
        steps.clear()
        for seen in phases.values():
            seen.clear()
        assert sample(pipe, num_inference_steps=10).isfinite().all()  # a warning is an error here
        assert steps != sorted(steps, reverse=True)
        distinct = sorted(set(pipe.scheduler.timesteps.tolist()), reverse=True)
        early = set(distinct[: round(0.4 * len(distinct))])
        for seen in phases.values():
            assert seen == ["agent" if t in early else "downsample" for t in steps]


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
@pytest.mark.parametrize(("kind", "options"), RISING)
def test_a_timestep_that_rises_opens_no_new_run(make_pipeline, sample, kind, options):
    pipe = make_pipeline(scheduler=kind(**BETAS, **options))
    phases = watch_phases(apply_agentsd(pipe, recipe=SHORT))
    sample(pipe, num_inference_steps=10)
    for seen in phases.values():
        assert seen.count("agent") == 1
        assert seen[0] == "agent"
    sample(pipe, num_inference_steps=10)
    for seen in phases.values():  # the next run is a new one
        assert seen == 2 * seen[: len(seen) // 2]


def test_a_guidance_cut_off_opens_no_new_run(make_pipeline, sample):
    pipe = make_pipeline(scheduler=diffusers.DDIMScheduler(**BETAS))
    batches = []
    pipe.unet.register_forward_pre_hook(lambda module, args: batches.append(args[0].shape[0]))

    def cut_off(pipe, step, t, tensors):
        if step == 2:
            pipe._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
        return tensors

    phases = watch_phases(apply_agentsd(pipe, recipe=SHORT))
    callback = {"callback_on_step_end": cut_off, "callback_on_step_end_tensor_inputs": ["prompt_embeds"]}
    sample(pipe, num_inference_steps=6, **callback)
    assert batches == [2] * 3 + [1] * 3
    for seen in phases.values():
        assert seen == ["agent"] + ["stock"] * 5


# Videos


def test_attention_over_time_is_left_alone():
    torch.manual_seed(0)
    unet = diffusers.UNet3DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32, 32),
        down_block_types=("CrossAttnDownBlock3D", "CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D", "CrossAttnUpBlock3D"),
        layers_per_block=1,
        cross_attention_dim=WIDTH,
        attention_head_dim=8,
        norm_num_groups=4,
    ).eval()
    latent = torch.randn(1, 4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    text = torch.ones(1, 7, WIDTH)

    def run():
        with torch.no_grad():
            return unet(latent, torch.tensor(999), text).sample

    stock = run()
    handle = apply_agentsd(unet, recipe=Recipe(Agents(), levels=3))
    phases = watch_phases(handle)
    assert handle.layer_names
    assert not any("temp_attentions" in name or "transformer_in" in name for name in handle.layer_names)
    temporal = [n for n, m in unet.named_modules() if "temp_attentions" in n and hasattr(m, "_agentsd")]
    assert not temporal
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no layer got other tokens than its level has
        patched = run()
    assert patched.isfinite().all()
    assert not torch.equal(patched, stock)
    assert all(seen == ["agent"] for name, seen in phases.items() if not name.startswith("mid_block"))
    handle.remove()
    assert torch.equal(run(), stock)


def test_videos_are_in_stages_of_their_own():
    """Each video of a batch gets what it gets alone, though its frames are images to the layers."""
    unet = diffusers.UNetMotionModel.from_unet2d(make_unet(), make_motion_adapter()).eval()
    rng = torch.Generator().manual_seed(0)
    start, step = (torch.randn(2, 4, 3, 16, 16, generator=rng) for _ in range(2))
    moves = torch.tensor([[10.0, 1], [10, 9]]).view(2, 2, 1, 1, 1, 1)  # of each video
    latents = [start, start + moves[:, 0] * step, start + moves.sum(1) * step]
    text = torch.randn(2, 7, WIDTH, generator=rng).repeat_interleave(3, 0)  # of each frame
    few, many = PooledAgents(4), PooledAgents(16)

    def last(recipe, videos=slice(0, 2), first=0):
        texts = text[3 * videos.start : 3 * videos.stop]
        with apply_agentsd(unet, recipe=recipe), torch.no_grad():
            for i in range(first, 3):
                out = unet(latents[i][videos], torch.tensor(900 - 10 * i), texts).sample
        return out

    together = last(Recipe(ByDistance((few, many), (0.5,), "sample")))
    for video, count in enumerate((many, few)):
        alone = last(Recipe(count), slice(video, video + 1), first=2)
        torch.testing.assert_close(together[video : video + 1], alone, rtol=0, atol=1e-4)
    assert not torch.allclose(together, last(Recipe(ByDistance((few, many), (0.5,)))), atol=1e-4)


def test_animatediff_in_stages_of_each_sample(make_pipeline):
    pipe = make_pipeline(
        cls=diffusers.AnimateDiffPipeline,
        scheduler=diffusers.DDPMScheduler(**BETAS, clip_sample=False),
        motion_adapter=make_motion_adapter(),
        feature_extractor=None,
        image_encoder=None,
    )
    stages = [PooledAgents(n) for n in range(4, 25)]
    thresholds = [0.9 - i / 100 for i in range(20)]
    handle = apply_agentsd(pipe, recipe=Recipe(ByDistance(stages, thresholds, "sample")))
    masked = []
    handle._sites[0].attn.register_forward_pre_hook(
        lambda m, args: masked.append(handle._layers[0].work.plan.pool.mask is not None)
    )
    settings = {"num_frames": 2, "height": 32, "width": 32, "num_inference_steps": 10}
    rng = torch.Generator().manual_seed(0)
    frames = pipe(["a cat", "a dog"], output_type="latent", generator=rng, **settings).frames
    assert frames.isfinite().all()
    assert any(masked)  # samples differed


# The door, copies, and blocks inside blocks


@pytest.mark.parametrize(
    "beside", [{"ratio": 0.4}, {"k": 0.075}, {"early_frac": 0.4}, {"mode": "fast"}, {"seed": 0}]
)
def test_a_setting_beside_a_recipe_is_refused_even_at_its_default(pipe, beside):
    with pytest.raises(ValueError, match=rf"{next(iter(beside))}.*beside recipe=.*pass it alone"):
        apply_agentsd(pipe, recipe=FAST, **beside)
    assert not hasattr(pipe.unet, "_agentsd")


@pytest.mark.parametrize(
    "recipe",
    [
        FAST,
        TRAINED,
        Recipe(layers={"mid_block.attentions.0.transformer_blocks.0.attn1": Merge()}),
        Recipe(ByDistance((PooledAgents(4), PooledAgents(16)), (0.5,), "sample")),
    ],
)
@pytest.mark.parametrize("way", ["pickle", "torch.save"])
def test_a_patched_unet_can_be_written_and_read(recipe, way):
    unet = make_unet()
    stock = call(unet)
    apply_agentsd(unet, recipe=recipe)
    patched = call(unet)
    if way == "pickle":
        twin = pickle.loads(pickle.dumps(unet))
    else:
        torch.save(unet, file := io.BytesIO())
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert not torch.equal(patched, stock)
    assert torch.equal(call(twin), patched)
    assert torch.equal(call(unet), patched)
    remove_agentsd(twin)
    assert torch.equal(call(twin), stock)
    assert not any(m._forward_pre_hooks for m in twin.modules())
    assert torch.equal(call(unet), patched)


def test_a_handle_of_a_copy_undoes_the_copy():
    unet = make_unet()
    stock = call(unet)
    apply_agentsd(unet)
    patched = call(unet)
    twin = pickle.loads(pickle.dumps(unet))
    twin._agentsd.remove()
    assert torch.equal(call(twin), stock)
    assert torch.equal(call(unet), patched)


def test_a_block_inside_another_puts_the_outer_patch_back(pipe, sample):
    before, stock = snapshot(pipe.unet), sample(pipe)
    with apply_agentsd(pipe) as outer:
        first = sample(pipe)
        with apply_agentsd(pipe, mode="turbo", ratio=0.6) as inner:
            second = sample(pipe)
            with apply_agentsd(pipe, recipe=Recipe(Phases(Merge(), None))):
                third = sample(pipe)
            assert pipe.unet._agentsd is inner
            assert torch.equal(sample(pipe), second)
        assert pipe.unet._agentsd is outer
        assert torch.equal(sample(pipe), first)
    assert snapshot(pipe.unet) == before
    assert torch.equal(sample(pipe), stock)
    assert not any(torch.equal(a, b) for a, b in [(first, second), (second, third), (third, stock)])


def test_a_block_inside_another_puts_trained_weights_back(tmp_path):
    unet = make_unet()
    stock = call(unet)
    with apply_agentsd(unet, recipe=trained_folder(tmp_path)):
        trained = call(unet)
        with apply_agentsd(unet):
            assert not torch.equal(call(unet), trained)
        assert torch.equal(call(unet), trained)
    assert torch.equal(call(unet), stock)


def test_plain_patches_in_a_row_keep_no_older_one_alive(pipe):
    """Only what a `with` block puts back is kept."""
    handles = [apply_agentsd(pipe, seed=seed) for seed in range(5)]
    oldest = weakref.ref(handles[0])
    del handles
    gc.collect()
    assert oldest() is None
    with apply_agentsd(pipe, seed=7), apply_agentsd(pipe, seed=8), apply_agentsd(pipe, seed=9):
        pass
    assert pipe.unet._agentsd.recipe.seed == 4


def test_a_thread_that_was_interrupted_in_a_call_keeps_no_other_out(pipe, sample):
    expected = sample(pipe)
    apply_agentsd(pipe, ratio=0.0, early_frac=0.0, mode="exact")  # stock's picture

    def interrupt(module, args):
        hook.remove()
        raise KeyboardInterrupt

    hook = pipe.unet.mid_block.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        sample(pipe)
    made = []
    thread = threading.Thread(target=lambda: made.append(sample(pipe)))
    thread.start()
    thread.join()
    assert torch.equal(made[0], expected)
