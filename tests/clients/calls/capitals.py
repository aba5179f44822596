"""A task for inspect-ai."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task  # type: ignore[untyped-decorator]
def capitals() -> Task:
    asked = Sample(input="What is the capital of France?", target="Paris")
    return Task(dataset=[asked], solver=generate(), scorer=includes())
