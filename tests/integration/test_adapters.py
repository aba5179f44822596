"""LoRA adapters with real vLLM: the answers of the merged model; added, replaced, removed, and nothing beside."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters import SHAPES, make_adapter, merge
from tests.integration.conftest import FAST, Corral
from tests.integration.test_serving import call
from tests.integration.transformers_scores import reference
from tests.tiny_llama import HIDDEN, INTERMEDIATE, make_tiny_llama

TEXTS = [("Once upon", " a time"), ("The capital of France is", " Paris"), ("def f(x):", "return")]
ALL = {**SHAPES, "self_attn.o_proj": (HIDDEN, SHAPES["self_attn.q_proj"][0]), "mlp.up_proj": (INTERMEDIATE, HIDDEN)}
GIVEN: dict[str, dict[str, Any]] = {  # seed, rank, modules, scale: alpha / rank
    "first": {"seed": 1, "rank": 4},
    "second": {"seed": 2, "rank": 6, "shapes": ALL, "rank_pattern": {}},
    "third": {"seed": 3, "rank": 8, "shapes": ALL, "lora_alpha": 4},
}
SCALES = {"first": 2.0, "second": 2.0, "third": 0.5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("base") / "tiny", dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each adapter's weights in the model itself."""
    place = tmp_path_factory.mktemp("merged")
    found = {}
    for name, given in GIVEN.items():
        made = make_adapter(place / f"{name}-adapter", **given)
        found[name] = make_tiny_llama(place / name, dtype="float32")
        merge(found[name], made, SCALES[name])
    return found


@pytest.fixture(scope="module")
def server(corral: Corral, model: Path, folder: Path) -> Iterator[dict[str, Any]]:
    for name in ("first", "second"):
        make_adapter(folder / name, **GIVEN[name])
    make_adapter(folder.parent / "outside", **GIVEN["third"])
    options = (
        "--name",
        "adapted",
        *FAST,
        "--set",
        "dtype=fp32",
        "--set",
        "max_loras=1",
    )  # one makes room for the next
    document = corral.json("up", str(model), "--adapters", str(folder), *options)
    yield document
    corral.run("down", "adapted", check=False)


@pytest.fixture(scope="module")
def key(server: dict[str, Any]) -> str:
    return Path(server["endpoint"]["key_file"]).read_text().strip()


def difference(corral: Corral, server: dict[str, Any], name: str, model: Path) -> float:
    """The largest difference of a token's log-probability after each text; transformers has the merged model.

    vLLM 0.32 gives those of a prompt's own tokens with adapters on no CPU: its engine ends.
    """
    texts = [{"id": str(n), "context": c, "continuation": t} for n, (c, t) in enumerate(TEXTS)]
    theirs = reference(corral, model, "float32", texts)
    key, worst = Path(server["endpoint"]["key_file"]).read_text().strip(), 0.0
    for (context, _), other in zip(TEXTS, theirs, strict=True):
        body = {"model": name, "prompt": list(context.encode()), "max_tokens": 1, "logprobs": 1,
                "allowed_token_ids": other["tokens"][:1]}  # fmt: skip
        status, answer = call(server, "POST", "/v1/completions", key, body)
        assert status == 200, answer
        ours = json.loads(answer)["choices"][0]["logprobs"]["token_logprobs"][0]
        worst = max(worst, abs(ours - other["logprobs"][0]))
    return worst


def listed(server: dict[str, Any], key: str) -> dict[str, str | None]:
    status, body = call(server, "GET", "/v1/models", key)
    assert status == 200
    return {card["id"]: card["parent"] for card in json.loads(body)["data"]}


def complete(server: dict[str, Any], key: str, name: str) -> tuple[int, str]:
    return call(server, "POST", "/v1/completions", key, {"model": name, "prompt": "Once", "max_tokens": 4})


def test_answers_are_those_of_the_merged_model(
    corral: Corral, server: dict[str, Any], key: str, model: Path, merged: dict[str, Path]
) -> None:
    assert listed(server, key) == {"tiny": None, "first": "tiny", "second": "tiny"}  # before anybody used one
    for name in ("first", "second", "first"):  # there is one slot: each time another makes room
        assert difference(corral, server, name, merged[name]) < 1e-3
    assert difference(corral, server, "tiny", model) < 1e-3
    assert difference(corral, server, "first", model) > 0.1  # otherwise nothing was shown
    assert listed(server, key) == {"tiny": None, "first": "tiny", "second": "tiny"}


def test_an_adapter_is_added_replaced_and_removed_while_it_serves(
    corral: Corral, server: dict[str, Any], key: str, folder: Path, merged: dict[str, Path]
) -> None:
    source = merged["third"].with_name("third-adapter")
    added = corral.json("adapter", "add", "third", str(source), "-d", "adapted")
    assert (added["servers"], added["rank"]) == (1, 8)
    assert difference(corral, server, "third", merged["third"]) < 1e-3
    shown = {row["name"]: row["servers"] for row in corral.json("adapter", "list", "-d", "adapted")}
    assert shown == {"first": 1, "second": 1, "third": 1}
    assert corral.json("adapter", "remove", "second", "-d", "adapted")["servers"] == 0
    assert complete(server, key, "second")[0] == 404
    corral.run("adapter", "add", "second", str(source), "-d", "adapted")  # the name, with other weights
    assert difference(corral, server, "second", merged["third"]) < 1e-3
    assert not [one for one in folder.iterdir() if one.name.startswith(".")]


def test_what_does_not_fit_is_not_added(corral: Corral, server: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "wide", shapes={"mlp.up_proj": (INTERMEDIATE, 2 * HIDDEN)})
    make_adapter(tmp_path / "high", rank=32)
    for name, says in (("wide", "the model's is"), ("high", "max_lora_rank is 8")):
        done = corral.run("adapter", "add", name, str(tmp_path / name), "-d", "adapted", check=False)
        assert done.returncode
        assert says in done.stderr
        assert not (folder / name).exists()


def test_nothing_else_can_be_loaded(server: dict[str, Any], key: str, folder: Path) -> None:
    outside = folder.parent / "outside"
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/load_lora_adapter/", "/invocations"):
        body = {"lora_name": "outside", "lora_path": str(outside)}
        assert call(server, "POST", path, key, body)[0] == 403
        assert call(server, "POST", path, None, body)[0] == 401
    for name in ("../outside", str(outside), "outside", "first/../../outside", "."):
        assert complete(server, key, name)[0] == 404, name
    assert "outside" not in listed(server, key)
