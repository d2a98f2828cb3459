"""Keeps what joins requests and trajectories, and what engines and tools did for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rltrace.analysis.coded import Coded
from rltrace.analysis.numbers import number, number_of
from rltrace.analysis.seen.process import Seen
from rltrace.analysis.seen.rows import Rows, Times, distinct, extend, groups, whole_numbers
from rltrace.analysis.seen.spans import EngineSteps, place_of
from rltrace.events import RAY_CALL, RAY_SUBMIT, REQUEST, Args, asked_ids, prompt_of
from rltrace.read.columns import NO_TEXT, Columns

SERVED = "generate"
"""The method by which an agent loop asks a server for tokens, in all that are known."""


def is_served(rows: Columns, chosen: Rows) -> NDArray[np.bool_]:
    """Return which of some spans are of calls by which a server is asked for tokens."""
    methods, places = _texts(rows, "method", chosen)
    are_served = [method is not None and method.rpartition(".")[2] == SERVED for method in methods]
    found: NDArray[np.bool_] = np.array(are_served, np.bool_)[places]
    return found


def see_passed(seen: Seen, chosen: Rows, rows: Columns, times: Times) -> None:
    """Keep of spans on the way of a request what joins each with the next one; of Ray's calls those with an arrow."""
    names = rows.name[chosen]
    for places in groups(names):
        name, own = rows.texts[names[places[0]]], chosen[places]
        if name in (RAY_SUBMIT, RAY_CALL):
            arrows = rows.first_keys(own, is_out=name == RAY_SUBMIT)
            own, arrows = own[[key is not None for key in arrows]], [key for key in arrows if key is not None]
            if not arrows:
                continue
            keys = Coded(arrows, np.arange(len(arrows)))
        else:
            keys = _requests_of(own, name, rows)
        kept = seen.passed[name]
        times.put(kept, own)
        extend(kept.places, _lanes(seen, own, rows))
        extend(kept.keys, keys.numbered(number_of))
        if name in (RAY_SUBMIT, RAY_CALL):
            continue
        extend(kept.trajectories, _hashes(rows, "trajectory", own))
        for told in ("tokens", "prompt_tokens"):
            extend(getattr(kept, told), whole_numbers(rows, told, own, -1))
        if name == REQUEST:
            extend(kept.stems, keys.numbered(lambda key: number_of(asked_ids(key)[1])))
            extend(kept.prompts, keys.numbered(lambda key: _prompt(seen, prompt_of(key))))
            for told in ("queued_ns", "first_token_ns", "cached_tokens"):
                extend(getattr(kept, told), whole_numbers(rows, told, own, -1))


def _lanes(seen: Seen, chosen: Rows, rows: Columns) -> NDArray[np.int64]:
    """Return the thread and task of some rows, as one number each."""
    threads, of_threads = distinct(rows.thread[chosen])
    tasks, of_tasks = distinct(rows.task[chosen])
    lanes, places = distinct(of_threads * len(tasks) + of_tasks)
    said = [(threads[lane // len(tasks)].item(), tasks[lane % len(tasks)].item()) for lane in lanes.tolist()]
    return np.array([number(seen.process.key, *lane) for lane in said], np.int64)[places]


def _hashes(rows: Columns, key: str, chosen: Rows) -> NDArray[np.int64]:
    """Return a number for each row's text; 0 for none."""
    return _texts(rows, key, chosen).numbered(lambda text: 0 if text is None else number(text))


def _texts(rows: Columns, key: str, chosen: Rows) -> Coded:
    """Return the text that each row has for an argument; None for none."""
    texts, places = distinct(rows.arguments[key][chosen] + 1)  # 0 for none
    return Coded([rows.texts[text - 1] if text else None for text in texts.tolist()], places)


def _prompt(seen: Seen, prompt: object) -> int:
    """Return a number for what an engine's samples have in common; 0 for nothing."""
    return 0 if prompt is None else number(seen.process.key, prompt)


def see_trajectories(seen: Seen, chosen: Rows, rows: Columns, times: Times) -> None:
    """Keep trajectories."""
    kept = seen.trajectories
    times.put(kept, chosen)
    extend(kept.places, _lanes(seen, chosen, rows))
    extend(kept.trajectories, _hashes(rows, "trajectory", chosen))
    args = [*rows.all_args(chosen)]
    kept.prompts.extend([0 if (prompt := sampled_prompt(one)) is None else number(*prompt) for one in args])
    kept.are_validating.extend([one.get("validate") is True for one in args])


def sampled_prompt(args: Args) -> tuple[str, ...] | None:
    """Return what the trajectories of one prompt have in common: its name, or verl's step and place in the data."""
    if "prompt" in args:
        return (str(args["prompt"]),)
    return (str(args.get("step")), str(args["sample_index"])) if "sample_index" in args else None


def see_tool_calls(seen: Seen, chosen: Rows, rows: Columns, times: Times) -> None:
    """Keep calls of tools."""
    kept = seen.tool_calls
    times.put(kept, chosen)
    extend(kept.places, _lanes(seen, chosen, rows))
    extend(kept.trajectories, _hashes(rows, "trajectory", chosen))
    tools, names = rows.arguments["tool"][chosen].tolist(), rows.name[chosen].tolist()
    for tool, name in zip(tools, names, strict=True):
        kept.tools.append(place_of(rows.texts[name if tool == NO_TEXT else tool], kept.names))


def _requests_of(chosen: Rows, name: str, rows: Columns) -> Coded:
    """Return the ids of some rows' requests; one without an id joins nothing."""
    said = rows.arguments["request_id"][chosen]
    has_text = said != NO_TEXT
    others = [str(rows.args(row).get("request_id", name)) for row in chosen[~has_text].tolist()]
    texts, of_texts = distinct(said[has_text])
    places = np.empty(len(chosen), np.intp)
    places[has_text], places[~has_text] = of_texts, len(texts) + np.arange(len(others))
    return Coded([*map(rows.texts.__getitem__, texts.tolist()), *others], places)


def see_engine_steps(kept: EngineSteps, chosen: Rows, rows: Columns, times: Times) -> None:
    """Keep steps of an engine."""
    times.put(kept, chosen)
    extend(kept.running, whole_numbers(rows, "running", chosen, -1))
    extend(kept.waiting, whole_numbers(rows, "waiting", chosen, -1))
    for told in ("preempted", "drafted", "accepted"):
        extend(getattr(kept, told), whole_numbers(rows, told, chosen))
    usage = rows.arguments["kv_usage"][chosen]
    extend(kept.kv_usage, np.where(np.isnan(usage), -1.0, usage))
