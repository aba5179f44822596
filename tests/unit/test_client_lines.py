"""`corral env --for CLIENT`: the variables of each client, and the line to type."""

from __future__ import annotations

import pytest

from corral.base.errors import UsageError
from corral.cli.client_lines import CLIENTS, EndpointFacts, client_called, file_text, typed_line, variables_for
from tests.unit.conftest import Corral

FACTS = EndpointFacts("http://127.0.0.1:8000", "my model", "/home/a/key", "/models/a b")
KEY = "s" * 40


@pytest.mark.parametrize("name", list(CLIENTS))
def test_a_key_is_in_variables_and_in_no_line(name: str) -> None:
    row = client_called(name)
    variables, typed = variables_for(row, FACTS, KEY), file_text(row, FACTS) + typed_line(row, FACTS)
    assert KEY not in typed
    assert "{" not in "".join(variables.values())
    assert variables or typed
    whole = " ".join([*variables.values(), typed])
    assert "127.0.0.1:8000" in whole


def test_what_a_line_is_made_of_is_quoted_for_the_shell() -> None:
    typed = typed_line(client_called("vllm-bench"), FACTS)
    assert "--model 'my model' --tokenizer '/models/a b'" in typed
    assert "    credentials_file: /home/a/key\n" in file_text(client_called("prometheus"), FACTS)


def test_an_unknown_client_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="'lm_eval' is not a client that Corral knows") as caught:
        client_called("lm_eval")
    assert "Did you mean 'lm-eval'?" in caught.value.remedy


def test_the_lines_of_a_deployment(answering: Corral) -> None:
    assert answering("up", str(answering.model), "--name", "one").code == 0
    done = answering("env", "one", "--for", "lm-eval")
    assert done.code == 0, done.err
    exported, typed = done.out.splitlines()
    assert exported.startswith("export OPENAI_API_KEY=")
    assert typed.startswith("# lm_eval --model local-completions --tasks TASK --model_args model=")
    assert f"tokenizer={answering.model}" in typed
    assert answering("env", "one", "--json").json().keys() == {"OPENAI_BASE_URL", "OPENAI_API_KEY"}
    assert answering("env", "one", "--for", "nothing").code == 2
    lines = answering("env", "one", "--for", "aiperf").out.splitlines()
    assert lines[1] == "# # aiperf.yaml"
    assert "#     api_key: ${OPENAI_API_KEY}" in lines
    assert lines[-1] == "# aiperf profile --config aiperf.yaml"
