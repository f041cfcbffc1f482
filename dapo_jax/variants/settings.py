"""Settings of the curriculum, the value model and objectives that choose tokens."""
# fmt: off

from dataclasses import dataclass

from dapo_jax.gate import Section, setting, wrong


@dataclass
class Curriculum(Section, place="curriculum"):
    """Problems chosen by their pass rate when last drawn, and the temperature (docs/curriculum.md)."""

    pass_rate_cap: float = setting(0.0, "No-Positive-Resampling: a problem that reached this pass rate is left out of later epochs (ScaleRL: .9); 0 = none is", 0.0, 1.0)
    revisit_epochs: int = setting(0, "epochs after which such a problem is drawn again; 0 = never", 0)
    band_low: float = setting(0.0, "band pass: Dynamic Sampling keeps groups with a pass rate above this (mean score, for a reward that gives only a score)", 0.0, 1.0)
    band_high: float = setting(1.0, "and below this; 0 and 1 = no band", 0.0, 1.0)
    temperature_schedule: str = setting("constant", "how the sampling temperature changes from rollout.temperature to temperature_end", choices=("constant", "linear", "cosine"))
    temperature_steps: int = setting(0, "ROLLOUT steps in which it changes", 0)
    temperature_end: float = setting(1.0, "its final value", 1e-3, 1e3)

    def mistakes(self) -> list[str]:
        moves = self.temperature_schedule != "constant"
        return wrong(
            (self.revisit_epochs and not self.pass_rate_cap, "config.curriculum.revisit_epochs: wants pass_rate_cap, which leaves them out"),
            (not self.band_low < self.band_high, f"config.curriculum.band_low: {self.band_low} is not below band_high = {self.band_high}: no group would lie between them"),
            (moves and not self.temperature_steps, f"config.curriculum.temperature_steps: schedule {self.temperature_schedule!r} needs the rollout steps in which the temperature changes"),
            ((self.temperature_steps or self.temperature_end != 1.0) and not moves, "config.curriculum.temperature_schedule: 'constant' takes no temperature_steps or temperature_end; set 'linear' or 'cosine'"),
        )


@dataclass
class Critic(Section, place="critic"):
    """Value model (VAPO, arXiv 2504.05118; docs/vapo.md): advantages by GAE, not by group."""

    enabled: bool = setting(False, "a value model beside the policy, and its GAE advantages")
    init_from: str = setting("", "Hugging Face directory or hub name it starts from: a reward model (its score.weight is the head) or a language model (new head); '' = the policy's weights and a new head", path=True)
    lr: float = setting(2e-6, "its AdamW learning rate; betas, epsilon, decay and clip are optim.*'s", 0.0, 10.0)
    warmup_steps: int = setting(0, "ROLLOUT steps of linear warm-up of that rate", 0)
    pretrain_steps: int = setting(50, "first ROLLOUT steps, in which only the value model learns (VAPO section 5.1: 50); the policy's warm-up starts after them", 0)
    gamma: float = setting(1.0, "discount per token", 0.0, 1.0)
    lambda_value: float = setting(1.0, "lambda of the value model's targets (decoupled GAE) once pretrain_steps are over; 1 = the target is the reward, as always in those", 0.0, 1.0)
    lambda_policy: float = setting(0.95, "lambda of the policy's advantages if length_alpha is 0", 0.0, 1.0)
    length_alpha: float = setting(0.05, "alpha of the policy's length-adaptive lambda 1 - 1 / (alpha l) (VAPO Eq. 5), l tokens; 0 = lambda_policy at any length", 0.0, 1e6)
    bootstrap_truncated: bool = setting(False, "a response cut at rollout.max_response_tokens continues with the value of its last state, in place of its reward; False = its reward, and 0 after it")
    clip: float = setting(0.0, "a value is trained only within this distance of its value at the start of the step, in the reward's unit (PPO's value clip); 0 = off", 0.0, 1e6)

    def mistakes(self) -> list[str]:
        return wrong((self.init_from and not self.enabled, "config.critic.init_from: there is no value model to start; set critic.enabled=True, or init_from=''"))


@dataclass
class Tokens(Section, place="tokens"):
    """Objectives that look at the whole mini-batch (docs/own_loss.md)."""

    clip_cov_share: float = setting(2e-4, "clip_cov: share r of the tokens that are drawn to leave the loss", 1e-9, 1.0)
    clip_cov_low: float = setting(1.0, "clip_cov: tokens are drawn whose covariance is above this", -1e6, 1e6)
    clip_cov_high: float = setting(5.0, "and below this", -1e6, 1e6)
    kl_cov_share: float = setting(2e-3, "kl_cov: share k of the tokens, of the largest covariance, that are held to the old policy (authors: 2e-3 with 7B, 2e-4 with 32B)", 1e-9, 1.0)
    kl_cov_coef: float = setting(1.0, "kl_cov: beta, by which they are held", 0.0, 1e6)
    entropy_share: float = setting(0.2, "high_entropy: share rho of the tokens, of the highest entropy, that are trained", 1e-9, 1.0)

    def mistakes(self) -> list[str]:
        return wrong((not self.clip_cov_low < self.clip_cov_high, f"config.tokens.clip_cov_low: {self.clip_cov_low} is not below clip_cov_high = {self.clip_cov_high}: no covariance would lie between them"))
