"""An explanation (explain.py) for people: as text for the terminal, as HTML for a notebook."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dapo_jax.lab.dynamics import browse


def text(out: Mapping[str, Any], token: int | None = None) -> str:
    """An explanation for the terminal."""
    record, n = out["record"], out["weights_after_step"]
    lines = [f"{out['run']}, step {out['step']}: drawn by the weights after step {n}"]
    lines += [f"note: {note}" for note in out["notes"]]
    lines += [
        f"problem {out['problem']} of {out['source']}, position {out['position']} (epoch"
        f" {out['epoch']}), answer {out['answer']}; the group"
        f" {'teaches' if out['teaches'] else 'does not teach'}"
    ]
    lines += [f"  | {line}" for line in out["prompt"].splitlines()]
    checked = [
        f"{record[k]} {what}"
        for k, what in (
            ("of_this_problem", "rows of rollouts/"),
            ("of_another", "rows of rollouts/ of another problem (it has none of this one)"),
            ("journal", "responses of the journal"),
        )
        if record[k]
    ]
    if n := out.get("whole_step", {}).get("metrics_compared"):
        checked += [f"{n} numbers of metrics.jsonl"]
    if record["differences"]:
        lines += [f"NOT AS RECORDED: {x}" for x in record["differences"]]
        lines += ["  other weights, config, data or versions than the run had, or another machine"]
    else:
        nothing = "nothing: the run has no record of this step"
        lines += [f"as recorded: {', '.join(checked) or nothing}"]
    if step := out.get("whole_step"):
        where = "in the batch" if step["in_batch"] else "drawn, and not in the batch"
        where = where if step["drew_it"] or step["in_batch"] else "not drawn in this step"
        lines += [f"whole step: this group is {where}"]
        if step["loss_by_tokens"] is not None:
            logged = step["policy/loss"]
            lines += [
                f"  weights x losses of all tokens, mean of {step['updates']} updates:"
                f" {step['loss_by_tokens']:+.8f}; policy/loss is"
                f" {'-' if logged is None else format(logged, '+.8f')}"
            ]
    lines += ["", *_samples(out["samples"])]
    for name, other in out["what_if"].items():
        if "teaches" not in other:  # another loss of the same tokens
            lines += ["", f"with {name}:", *_losses(out["samples"], other["samples"])]
            continue
        teaches = "teaches" if other["teaches"] else "does not teach"
        lines += ["", f"with {name}: the group {teaches}", *_samples(other["samples"])]
    if "tokens" in out and token is None:
        row = out["samples"][out["sample"]]
        lines += ["", f"sample {out['sample']}:", *_tokens(out["tokens"])]
        lines += [f"  parts of its score: {row['parts']}"] * bool(row["parts"])
    elif "tokens" in out:
        lines += ["", *_candidates(out["tokens"][token])]
    return "\n".join(lines)


def _number(x: float | None, form: str = "+.3f") -> str:
    return "-" if x is None else format(x, form)


def _quoted(text: str, most: int = 60) -> str:
    said = json.dumps(text, ensure_ascii=False)
    return said if len(said) <= most else f'{said[: most - 4]}..."'


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they have to be; all but the last to the right."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = lambda row: [x.rjust(w) for x, w in zip(row[:-1], wide, strict=False)]
    return [f"  {'  '.join([*cells(row), row[-1]])}".rstrip() for row in rows]


def _samples(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = ["sample", "tokens", "right", "score", "penalty", "reward", "advantage"]
    whole = [k for k in ("update", "weight", "loss", "ratio_min", "ratio_max") if k in rows[0]]
    out = [[*names, *whole, *["clipped"] * bool(whole), "response"]]
    judged = {True: "yes", False: "no", None: "-"}
    for r in rows:
        cells = [str(r["sample"]), f"{r['tokens']}{'+' * r['truncated']}", judged[r["right"]]]
        cells += [_number(r[k], "+.2f") for k in ("score", "overlong_penalty", "reward")]
        cells += [_number(r["advantage"]), *(_short(k, r.get(k)) for k in whole)]
        cells += [_clipped(r)] * bool(whole) + [_quoted(r["response"])]
        out.append(cells)
    return _table(out)


def _losses(rows: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> list[str]:
    if not others:
        return ["  no update of this step has trained on the group"]
    out = [["sample", "loss", "by this", "clipped low/high/dual"]]
    for r in others:
        cells = [_number(x, "+.5f") for x in (rows[r["sample"]]["loss"], r["loss"])]
        out.append([str(r["sample"]), *cells, _clipped(r)])
    return _table(out)


def _clipped(row: Mapping[str, Any]) -> str:
    kinds = ("clipped_low", "clipped_high", "dual_clipped")
    return "/".join(str(row.get(k, 0)) for k in kinds)


def _short(name: str, x: float | None) -> str:
    return _number(x, "d" if name == "update" else ".4f" if "ratio" in name else "+.5f")


def _tokens(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    extra = [k for k in ("weight", "advantage", "ratio", "loss") if k in rows[0]]
    names = ["#", "logp", "entropy", "uniform", "from", "to", "step", *extra, "clipped"]
    out = [[*names, "token"]]
    for t in rows:
        place = t["candidates"][t["drawn"]][1:] if t["candidates"] else (None, None)
        cells = [str(t["token"]), _number(t["logp"], ".4f"), _number(t["entropy"], ".3f")]
        cells += [_number(x, ".4f") for x in (t["uniform"], *place)]
        cells += ["reply" if t["reply"] else str(t["weights_after_step"])]
        cells += [_number(t[k], "+.4f") for k in extra]
        out.append([*cells, t.get("clipped", ""), _quoted(t["piece"])])
    note = "  uniforms outside from..to: this forward pass rounds otherwise than the sampler did"
    return _table(out) + [note] * any(t["forward_draws_it"] is False for t in rows)


def _candidates(t: Mapping[str, Any]) -> list[str]:
    if t["reply"]:
        return [f"token {t['token']}: of a reply; the policy did not draw it, its weight is 0"]
    said = f"token {t['token']}: uniform {t['uniform']:.6f}"
    if not t["candidates"]:
        if (by := t["weights_after_step"]) < 0:
            return [f"{said}; drawn in an earlier step, which carried the group over"]
        return [f"{said}; drawn by the weights after step {by}: ask RUN@{by + 1} for it"]
    rows = [["", "from", "to", "share", "token"]]
    for i, (piece, low, high) in enumerate(t["candidates"]):
        cells = [_number(x, ".6f") for x in (low, high, high - low)]
        rows.append([">" * (i == t["drawn"]), *cells, _quoted(piece)])
    return [f"{said} falls into", *_table(rows)]


def page(out: Mapping[str, Any]) -> str:
    """An explanation as HTML, for a notebook or a file."""
    rows = out["samples"]
    shown = ["sample", "tokens", "right", "score", "overlong_penalty", "reward", "advantage"]
    shown += [k for k in ("weight", "loss", "ratio_max") if k in rows[0]]
    cell = lambda x: f"{x:.5g}" if isinstance(x, float) else "-" if x is None else str(x)
    of = lambda r: [*(cell(r.get(k)) for k in shown), r["response"]]
    parts = [browse.html("table", [*shown, "response"], [(0.0, of(r)) for r in rows])]
    if "tokens" in out:
        row, them = rows[out["sample"]], out["tokens"]
        sample = browse.Sample(
            out["step"], out["problem"], out["prompt"], row["response"], out["answer"],
            row["tokens"], row["truncated"], row["entropy"], row["right"],
            extracted=row["extracted"], reward=row["reward"], pieces=[t["piece"] for t in them],
            entropies=[t["entropy"] or 0.0 for t in them], logps=[t["logp"] or 0.0 for t in them],
            drawn=[int(not t["reply"]) for t in them],
        )  # fmt: skip
        parts.append(browse.page([sample], f"sample {out['sample']}"))
        names = ["token", "piece", "logp", "entropy", "uniform", "ratio", "weight", "clipped"]
        shade = lambda t: -1.0 if t["reply"] else t["entropy"]  # as `browse` shows a reply
        cells = [(shade(t), [cell(t.get(k)) for k in names]) for t in them]
        parts.append(browse.html("table", names, cells))
    return "\n".join(parts)


def file(out: Mapping[str, Any]) -> str:
    """An explanation as an HTML file of its own: the page, and below it what the terminal says."""
    words = browse.html("words", text(out))
    return browse.html("file", f"{out['run']}, step {out['step']}", [page(out), words])


def listed(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The problems in the record of a step."""
    out = [["position", "problem", "tokens", "reward", "response"]]
    for r in rows:
        cells = [str(r["position"]), str(r["problem"]), str(r["tokens"]), f"{r['reward']:+.2f}"]
        out.append([*cells, _quoted(r["response"])])
    return "\n".join([f"{name}: rollouts/ holds", *_table(out)])
