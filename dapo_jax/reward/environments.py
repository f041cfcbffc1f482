"""The score of an environment: `reward.function=verifiers:ID`, or `tinker:MODULE:NAME`."""

from dapo_jax.dapo.reward import Grade
from dapo_jax.data import environments
from dapo_jax.data.problems import Problem
from dapo_jax.reward import forms


def score_of(name: str) -> forms.Form:
    """The sum of the weighted rewards that the task of a problem gives a response, with its rewards
    and metrics as parts; or what a step of a ProblemEnv gives a response that a stop token has
    ended. An error of its code is raised, so `reward.on_error` decides; one of its scores that is
    missing is an error too. ValueError: see `data/environments.py: tasks`."""
    tasks = environments.tasks(name)

    async def score(problem: Problem, response: str) -> Grade:
        if (task := tasks.get(problem.row.get("task"))) is None:
            raise ValueError(f"{name} has no task for this row; its own are data.train={name}")
        if name.startswith(environments.TINKER):
            done = await (await task.environment()).step(response)
            return Grade(done.reward, parts=done.metrics)
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.graph import MessageNode
        from verifiers.v1.state import state_cls
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask
        from verifiers.v1.types import AssistantMessage, SystemMessage, UserMessage

        said = {"system": SystemMessage, "user": UserMessage, "assistant": AssistantMessage}
        about = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        trace = Trace(task=about, agent=AgentInfo(config=AgentConfig()))
        trace.state = state_cls(type(task))()
        asked = [said[m["role"]](content=m["content"]) for m in environments.messages(task)]
        for message in (*asked, AssistantMessage(content=response)):
            parent = len(trace.nodes) - 1 if trace.nodes else None
            trace.nodes.append(MessageNode(parent=parent, message=message))
        trace.nodes[-1].sampled = True
        trace.ok = trace.is_completed = True
        await task.score(trace)
        parts = {k: r and r.score for k, r in trace.rewards.items()} | trace.metrics
        if missing := [k for k, x in parts.items() if x is None]:
            raise ValueError(f"{name} did not score {', '.join(missing)}")
        return Grade(trace.reward, parts=parts)

    return forms.Form(score, waits=True, name=name)
