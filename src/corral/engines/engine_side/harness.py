"""lm-evaluation-harness with Corral as its model. Runs in the harness's environment, started by `corral eval`.

The first line of stdin says what to do. The requests of the tasks go into a file, a line on stdout says so, and the
next line on stdin names the file with their answers. A closed stdin ends this process, so it does not outlive Corral.
Results and items are files too. Whatever else is printed goes to stderr.
"""

from __future__ import annotations

import contextlib
import datetime
import difflib
import hashlib
import json
import os
import random
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import numpy
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable

ANSWER_TOKENS = 256  # as lm-eval's other models
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class RefusedError(Exception):
    """What cannot be done, as Corral is told."""

    def __init__(self, kind: str, text: str, **details: Any) -> None:
        super().__init__(text)
        self.told = {"error": kind, "text": text, **details}


class Corral:
    """The process that started this one."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def read(self) -> dict[str, Any]:
        line = sys.stdin.readline()
        if not line:
            sys.exit(1)
        return json.loads(line)

    def tell(self, message: dict[str, Any]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


class Generation(jinja2.ext.Extension):
    """`{% generation %}` of chat templates, which marks what a model wrote; here it stands for its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's template, rendered as transformers does."""

    END = "END_OF_MESSAGE "

    def __init__(self, text: str, tokens: dict[str, str]) -> None:
        def refuse(message: str) -> None:
            raise jinja2.exceptions.TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = tojson
        env.globals["raise_exception"] = refuse
        env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        self._template, self._tokens = env.from_string(text), tokens

    def render(self, messages: list[dict[str, str]], answer_begins: bool) -> str:
        """The text of a conversation; its last message is unfinished unless an answer begins after it."""
        if answer_begins:
            return self._rendered(messages, True)
        *before, last = messages
        text = self._rendered([*before, {**last, "content": last["content"] + self.END}], False)
        at = text.rindex(self.END.strip())
        return text[:at] if text[at:].startswith(self.END) else text[:at].rstrip()

    def _rendered(self, messages: list[dict[str, str]], answer_begins: bool) -> str:
        try:
            return self._with(messages, answer_begins)
        except jinja2.exceptions.TemplateError:  # as lm-eval: templates without a system role
            return self._with([one for one in messages if one["role"] != "system"], answer_begins)

    def _with(self, messages: list[dict[str, str]], answer_begins: bool) -> str:
        return self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=answer_begins, **self._tokens
        )


class ServedModel(LM):
    """A model whose answers Corral fetches."""

    def __init__(self, corral: Corral, settings: dict[str, Any]) -> None:
        super().__init__()
        self._corral, self._file = corral, Path(settings["requests"])
        self._name, self._seed = settings["model"], settings["seeds"][0]
        tokens = settings["tokens"]
        self._bos, self._prefix = tokens.get("bos_token", ""), tokens.get("bos_token") or tokens.get("eos_token", "")
        self._template = ChatTemplate(settings["chat_template"], tokens) if settings["chat"] else None
        self._shown: dict[str, Any] = {}  # the first conversation: the server must render it to the same tokens
        self.ignored: set[str] = set()  # parameters of generation that vLLM does not have

    @property
    def tokenizer_name(self) -> str:
        return self._name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        assert self._template is not None
        text = self._template.render(chat_history, add_generation_prompt)
        if add_generation_prompt and not self._shown:
            self._shown = {"kind": "template", "messages": chat_history, "text": text}
        return text

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        rows: dict[Any, list[str]] = {}  # the choices of an item share its context
        for request in requests:
            context, continuation = request.args
            if not context:
                self._need_prefix(request.task_name)
            choices = rows.setdefault((request.task_name, request.doc_id, context), [])
            if continuation not in choices:
                choices.append(continuation)
        made = {
            key: self._row(
                kind="choices", context=key[2], continuations=choices, special=not self._begins(key[2], self._prefix)
            )
            for key, choices in rows.items()
        }
        answers = self._answers(made.values())
        results = []
        for request in requests:
            key = (request.task_name, request.doc_id, request.args[0])
            found = answers[made[key]["id"]]["likelihoods"][rows[key].index(request.args[1])]
            results.append((found["logprob"], found["greedy"]))
        return results

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        rows = []
        for request in requests:
            self._need_prefix(request.task_name)
            (text,) = request.args
            rows.append(self._row(kind="text", text=text, special=not self._begins(text, self._prefix)))
        answers = self._answers(rows)
        return [answers[row["id"]]["likelihoods"][0]["logprob"] for row in rows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        rows: list[dict[str, Any]] = []
        seen: dict[str, int] = {}
        for request in requests:
            row = self._generation(*request.args)
            if row["params"]["temperature"]:  # another answer each time, and the same ones in the next run
                key = json.dumps([row["context"], row["params"]])
                seen[key] = seen.get(key, -1) + 1
                row["params"]["seed"] = self._seed + seen[key]
            rows.append(self._row(**row))
        answers = self._answers(rows)
        return [postprocess_generated_text(answers[row["id"]]["text"], row["stop"], None) for row in rows]

    def _generation(self, context: str, given: dict[str, Any]) -> dict[str, Any]:
        kwargs = dict(normalize_gen_kwargs(given, ANSWER_TOKENS))
        stop = [text for text in handle_stop_sequences(kwargs.pop("until", None), None) if text]
        tokens, sampled, spread = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample"), kwargs.pop("temperature", 1.0)
        temperature = float(spread) if sampled else 0.0
        params = {name: kwargs.pop(name) for name in SAMPLING if name in kwargs}
        self.ignored |= kwargs.keys()
        return {
            "kind": "generate", "context": context, "special": not self._begins(context, self._bos), "stop": stop,
            "max_tokens": tokens, "params": {**params, "temperature": temperature},
        }  # fmt: skip

    def _begins(self, text: str, token: str) -> bool:
        return bool(token) and text.startswith(token)

    def _need_prefix(self, task: str) -> None:
        if not self._prefix:
            raise RefusedError("prefix", f"{task} scores text without a context", task=task)

    def _row(self, **row: Any) -> dict[str, Any]:
        key = json.dumps(row, sort_keys=True).encode()
        return {"id": hashlib.sha256(key).hexdigest()[:32], **row}

    def _answers(self, rows: Any) -> dict[str, Any]:
        unique = {row["id"]: row for row in rows}
        if self._shown:
            shown = self._row(**self._shown)
            unique = {shown["id"]: shown, **unique}
        with self._file.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in unique.values())
        self._corral.tell({"requests": len(unique)})
        answers = {}
        with open(self._corral.read()["answers"], encoding="utf-8") as file:
            for line in file:
                answer = json.loads(line)
                if answer["id"] in unique:
                    answers[answer["id"]] = answer
        return answers


def load_tasks(names: list[str], include: list[str]) -> tuple[TaskManager, list[Any]]:
    """The tasks and groups that are meant; the data files of a task that is not lm-eval's own lie beside its file."""
    manager = TaskManager(include_path=include, include_defaults=False)
    paths = {name: str(Path(name).absolute()) for name in names if name.endswith((".yaml", ".yml"))}
    missing = [path for name, path in paths.items() if not Path(path).is_file()]
    if missing:
        raise RefusedError("file", missing[0])
    if not all(name in paths or manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=include)
    specs: list[str] = []
    for name in names:
        found = [paths[name]] if name in paths else manager.match_tasks([name])
        if not found:
            raise RefusedError("task", name, nearest=difflib.get_close_matches(name, manager.all_tasks, 3))
        specs += found
    return manager, [one for spec in dict.fromkeys(specs) for one in load_task(manager, spec)]


def load_task(manager: TaskManager, spec: str) -> list[Any]:
    entry = manager.task_index.get(spec)
    path = entry.yaml_path if entry else Path(spec)
    own = path is None or Path(sys.modules["lm_eval"].__file__ or "").parent in Path(path).parents
    try:
        with contextlib.nullcontext() if own else contextlib.chdir(Path(path).parent):
            loaded = manager.load([spec])
    except OSError as error:
        raise RefusedError("data", f"{type(error).__name__}: {error}"[:600], task=spec) from error
    except Exception as error:
        raise RefusedError("task file", f"{type(error).__name__}: {error}"[:600], task=spec) from error
    groups = loaded.get("groups", {})
    members = {name for names in loaded.get("group_map", {}).values() for name in names}
    return [one for name, one in {**groups, **loaded["tasks"]}.items() if name not in members]


def run(corral: Corral, settings: dict[str, Any]) -> dict[str, Any]:
    seeds = dict(zip(SEEDS, settings["seeds"], strict=True))
    random.seed(seeds["random_seed"])
    numpy.random.seed(seeds["numpy_random_seed"])  # tasks may shuffle while they are loaded
    manager, tasks = load_tasks(settings["tasks"], settings["include"])
    model = ServedModel(corral, settings)
    results = simple_evaluate(
        model,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=settings["num_fewshot"],
        limit=settings["limit"],
        gen_kwargs=settings["gen_kwargs"],
        system_instruction=settings["system"],
        apply_chat_template=settings["chat"],
        fewshot_as_multiturn=settings["multiturn"],
        **seeds,
        confirm_run_unsafe_code=settings["unsafe_code"],
    )
    assert results is not None
    folder = Path(settings["folder"])
    samples = {}
    for task, items in results.pop("samples").items():
        samples[task] = re.sub(r"[^\w.-]", "_", task) + ".jsonl"
        with (Path(settings["samples"]) / samples[task]).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(item, default=handle_non_serializable) + "\n" for item in items)
    with (folder / "lm-eval.json").open("w", encoding="utf-8") as file:
        json.dump(results, file, default=handle_non_serializable)
    return {"done": samples, "ignored": sorted(model.ignored)}


def main() -> None:
    corral = Corral()
    settings = corral.read()
    try:
        corral.tell(run(corral, settings))
    except RefusedError as error:
        corral.tell(error.told)
    except Exception as error:
        traceback.print_exc()
        corral.tell({"error": "lm-eval", "text": f"{type(error).__name__}: {error}"[:600]})


if __name__ == "__main__":
    main()
