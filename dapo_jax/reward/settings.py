"""Settings of rewards."""
# fmt: off

from dataclasses import dataclass

from dapo_jax.gate import TOKENS, Section, setting


@dataclass
class Reward(Section, place="reward"):
    """How a response is graded (paper Eq. 7 and 13)."""

    verifier: str = setting("dapo", "verifier that decides correctness (another one is logged beside it); data/verifier.py, data/answers.py", choices=("dapo", "integer", "boxed", "math", "exact", "auto"))
    function: str = setting("", "replaces the verifier: functions as FILE.py:NAME, in a form of reward/forms.py (score(problem, response) -> Grade, verl's, TRL's), verifiers, format, or an environment of another package, verifiers:ID or tinker:MODULE:NAME; several as NAME=WEIGHT*WHAT with commas between")
    reply: str = setting("", "with rollout.turns: function reply(problem, transcript) -> Reply, Grade or None that answers a turn, as FILE.py:NAME, or a shipped tool: calculator, python, guess (docs/turns.md)")
    by_source: str = setting("", "another reward for some data sources: SOURCE=REWARD;SOURCE=REWARD, * in SOURCE for any text, REWARD as in reward.function")
    format_tags: str = setting("think,answer", "tags that the reward 'format' requires in this order, with commas between")
    workers: int = setting(0, "processes per host that grade responses with a time limit; 0 = none, the run grades them itself", 0, 1000)
    timeout_s: float = setting(10.0, "seconds that a worker, or an async reward, has for one response, or for one group where the reward takes groups", 0.01)
    concurrency: int = setting(64, "responses (or groups) for which a host waits together, where the reward is async", 1, 100_000)
    retries: int = setting(3, "times that a response is asked again after a failure that may pass (connection, time limit of an async reward, HTTP 408, 425, 429, 5xx), 1, 2, 4, ... seconds later", 0, 20)
    on_error: str = setting("stop", "a response for which the reward fails or takes too long: stop and name it, or count it as a miss with the score reward.wrong", choices=("stop", "miss"))
    correct: float = setting(1.0, "reward of a correct response", -1e6, 1e6)
    wrong: float = setting(-1.0, "reward of a wrong response", -1e6, 1e6)
    overlong_buffer_tokens: int = setting(12, "L_cache: the penalty ramps over this many last tokens (paper: 4096)", 0, TOKENS)
    overlong_penalty: float = setting(1.0, "size of the full penalty at L_max; 0 = no soft punishment", 0.0, 1e6)
