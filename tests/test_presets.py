"""Every number of a preset beside the source that gives it: none is without one."""

import pytest

from dapo_jax import config
from dapo_jax.config import presets
from dapo_jax.config.schema import leaves

DAPO = "DAPO, arXiv 2503.14476"
VERL = "verl, run_dapo_qwen2.5_32b.sh"
OURS = "a choice of ours"  # of memory, time or files; the algorithm does not depend on it
GRPO = {  # arXiv 2402.03300, without its KL term
    "dynamic_sampling.enabled": False,
    "reward.overlong_penalty": 0.0,
    "loss.clip_high": 0.2,
    "loss.normalizer": "sequence",
}
CISPO = {"loss.objective": "cispo", "loss.clip_low": 1.0, "loss.clip_high": 4.0}

# preset -> (what it is a change of, {source: {field: value}})
SOURCES = {
    "paper": (config.base, {
        f"{DAPO}, section 4.1": {
            "rollout.groups": 512, "rollout.group_size": 16, "rollout.max_response_tokens": 20480,
            "reward.overlong_buffer_tokens": 4096, "reward.overlong_penalty": 1.0,
            "optim.minibatches": 16, "optim.lr": 1e-6, "optim.warmup_steps": 20, "eval.k": 32,
            "eval.temperature": 1.0, "eval.top_p": 0.7,
            "loss.clip_low": 0.2, "loss.clip_high": 0.28, "loss.normalizer": "batch_tokens",
            "loss.kl_coef": 0.0, "dynamic_sampling.enabled": True,
        },
        VERL: {
            "data.max_prompt_tokens": 2048, "data.on_long": "left_truncate",
            "tokenizer.chat": True, "optim.b2": 0.999, "optim.clip_norm": 1.0, "eval.every": 5,
            "rollout.temperature": 1.0, "rollout.top_p": 1.0, "loss.entropy_coef": 0.0,
            "reward.correct": 1.0, "reward.wrong": -1.0, "reward.verifier": "dapo",
        },
        OURS: {
            "model.dtype": "bfloat16", "model.scan_layers": True, "model.remat": "full",
            "rollout.slots": 1024, "rollout.chunk": 128, "rollout.prefill_prompts": 64,
            "data.on_bad": "skip", "eval.max_problems": 0, "checkpoint.every": 1,
        },
    }),
    "verl": (config.paper, {
        VERL: {
            "optim.warmup_steps": 10, "optim.warmup_from_zero": True, "optim.weight_decay": 0.1,
            "loss.dual_clip": 10.0, "loss.normalizer": "chunk_tokens",
        },
    }),
    "vapo": (config.paper, {
        "VAPO, arXiv 2504.05118, section 5.1": {
            "critic.enabled": True, "critic.lr": 2e-6, "critic.pretrain_steps": 50,
            "critic.lambda_value": 1.0, "critic.length_alpha": 0.05, "critic.gamma": 1.0,
            "loss.positive_coef": 0.1,
        },
        "not in it": {"dynamic_sampling.enabled": False, "reward.overlong_penalty": 0.0},
    }),
    "grpo": (config.base, {"GRPO, arXiv 2402.03300": GRPO}),
    "dr_grpo": (config.paper, {
        "Dr. GRPO, arXiv 2503.20783, section 3.2":
            GRPO | {"advantage.scale": "none", "loss.normalizer": "constant"},
    }),
    "gspo": (config.paper, {
        "GSPO, arXiv 2507.18071, section 5.1": GRPO | {
            "loss.objective": "gspo", "loss.clip_low": 3e-4, "loss.clip_high": 4e-4,
            "optim.minibatches": 4,
        },
    }),
    "cispo": (config.paper, {
        "MiniMax-M1, arXiv 2506.13585": {
            "loss.objective": "cispo", "loss.clip_low": 1.0, "loss.normalizer": "group_tokens",
            "optim.b2": 0.95, "optim.eps": 1e-15,
        },
        "SkyRL and AReaL: a weight of at most 5": {"loss.clip_high": 4.0},
    }),
    "rloo": (config.paper, {
        "RLOO, arXiv 2402.14740": GRPO | {
            "loss.objective": "rloo", "advantage.scale": "none", "advantage.leave_one_out": True,
            "rollout.group_size": 4, "optim.minibatches": 1,
        },
    }),
    "scale_rl": (config.paper, {
        "ScaleRL, arXiv 2510.13786, section 3": CISPO | {
            "loss.normalizer": "group_tokens", "loss.old_logprobs": "reuse",
            "advantage.scale": "batch", "advantage.ddof": 0, "dynamic_sampling.refill": False,
            "curriculum.pass_rate_cap": 0.9, "reward.overlong_penalty": 0.0,
            "model.float32_head": True,
        },
        "its setup: 48 x 16 an update, 8 updates a rollout here": {
            "rollout.groups": 384, "rollout.group_size": 16, "optim.minibatches": 8,
            "optim.warmup_steps": 13, "rollout.max_response_tokens": 14336, "optim.lr": 5e-7,
            "optim.weight_decay": 0.01, "optim.eps": 1e-15, "optim.b2": 0.999,
        },
    }),
    "just_rl": (config.paper, {
        "JustRL, arXiv 2512.16649, run_scaling_ssh_distill.sh": {
            "data.max_prompt_tokens": 1024, "data.template": "boxed", "reward.verifier": "boxed",
            "reward.overlong_penalty": 0.0, "dynamic_sampling.enabled": False,
            "rollout.groups": 256, "rollout.group_size": 8, "rollout.max_response_tokens": 15360,
            "loss.dual_clip": 10.0, "optim.lr": 1e-6, "optim.minibatches": 4,
            "optim.weight_decay": 0.1, "optim.warmup_steps": 10, "optim.warmup_from_zero": True,
            "eval.every": 50, "eval.k": 32, "eval.temperature": 0.7, "eval.top_p": 0.9,
            "eval.max_response_tokens": 31744,
        },
    }),
    "gsm8k_dapo": (config.paper, {
        "AReaL, gsm8k_dapo_dynamic_bs.yaml": {
            "data.max_prompt_tokens": 1024, "rollout.groups": 256, "rollout.group_size": 4,
            "rollout.max_response_tokens": 4096, "reward.overlong_buffer_tokens": 512,
            "reward.correct": 1.0, "reward.wrong": 0.0, "advantage.epsilon": 1e-5,
            "advantage.whiten": True, "loss.importance": "token_mask", "loss.importance_cap": 5.0,
            "dynamic_sampling.refill": False, "optim.lr": 1.7e-5, "optim.warmup_steps": 0,
            "optim.weight_decay": 0.017, "optim.minibatches": 1, "loss.clip_high": 0.28,
        },
    }),
}  # fmt: skip


def test_each_recipe_has_its_sources():
    assert SOURCES.keys() == {*presets.RECIPES, "paper", "verl", "vapo"}


@pytest.mark.parametrize("name", SOURCES)
def test_a_preset_has_the_numbers_of_its_sources_and_no_others(name):
    start, sources = SOURCES[name]
    c = leaves(presets.RECIPES[name]() if name in presets.RECIPES else getattr(config, name)())
    said = {field: value for fields in sources.values() for field, value in fields.items()}
    assert {field: c[field] for field in said} == said
    was = leaves(start())
    assert {field for field in c if c[field] != was[field]} <= said.keys()
