"""Settings of sampling."""
# fmt: off

from dataclasses import dataclass

from dapo_jax.gate import ROWS, TOKENS, Section, setting, wrong


@dataclass
class Rollout(Section, place="rollout"):
    """Size of a batch, its responses, and the sampler (paper section 4.1: 512 prompts x 16)."""

    groups: int = setting(32, "groups (prompts) in a training batch, N", 1, ROWS)
    group_size: int = setting(8, "responses per prompt, G; 1 with critic.enabled only", 1, ROWS)
    max_response_tokens: int = setting(32, "longest response, L_max, end-of-text token included (paper: 20480)", 1, TOKENS)
    temperature: float = setting(1.0, "divides the logits; the recorded log-probs are at this temperature", 1e-3, 1e3)
    top_p: float = setting(1.0, "nucleus mass of training samples; below 1 the samples no longer come from the policy", 1e-6, 1.0)
    slots: int = setting(128, "responses decoded at a time", 1, ROWS)
    chunk: int = setting(8, "tokens decoded between two host visits", 1, TOKENS)
    prefill_prompts: int = setting(16, "prompts per prefill call", 1, ROWS)
    prefill_tokens: int = setting(512, "tokens of each prompt per prefill call; longer prompts take several calls", 8, TOKENS)
    page_tokens: int = setting(0, "tokens of a cache page; 0 = 128 on TPUs, 64 on GPUs, and on CPU a value that model/paged.py measured to be fast", 0, TOKENS)
    cache_dtype: str = setting("model", "keys and values while sampling: in model.dtype, or int8 with one scale per token and head, half the bytes; needs loss.importance_cap", choices=("model", "int8"))
    cache_fraction: float = setting(1.0, "size of the cache, as a share of what all slots at full length would fill; rows that no longer fit are sampled again later", 1e-6, 1.0)
    staleness: int = setting(0, "S: a step ends as soon as its batch is complete, unfinished responses continue in the next, and no trained token is older than S steps (docs/staleness.md); needs loss.importance_cap; 0 = a step ends when all its responses have", 0, 64)
    draft_tokens: int = setting(0, "most tokens that are guessed of a row and drawn in one pass (docs/drafts.md); 0 = none; on TPUs 15 at most", 0, TOKENS)
    draft_places: int = setting(0, "rows and guessed tokens of such a pass; 0 = slots, whose idle ones serve: the program and the bits of decoding without", 0, ROWS)
    draft_cost: float = setting(1.0, "time of such a pass, in those of decoding one token; a pass is made where more tokens than that are expected of a row", 1.0, 1e3)
    turns: int = setting(0, "most replies (reward.reply) in a response; their tokens count within max_response_tokens and are not trained on (docs/turns.md); 0 = none", 0, 1000)
    reply_tokens: int = setting(256, "most tokens of one reply's text; the rest is cut off", 1, TOKENS)

    def mistakes(self) -> list[str]:
        return wrong(
            (0 < self.draft_places < self.slots, f"config.rollout.draft_places: {self.draft_places} is less than rollout.slots = {self.slots}; set 0 for the slots' own places, or more"),
            (self.draft_places and not self.draft_tokens, "config.rollout.draft_places: nothing is guessed; set rollout.draft_tokens, or draft_places=0"),
        )
