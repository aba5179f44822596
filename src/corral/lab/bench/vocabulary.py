"""Words of which the server's own tokenizer makes exactly one token each: prompts of exact length, as plain text.

The tokenizers of this field split text at spaces first, so a text of n such words has n tokens (and the fixed few
that the server adds). Each candidate is checked against `/tokenize`, and so is one whole prompt. Where the tokenizer
is of another kind, prompts are lists of token ids it has shown us; where there is no `/tokenize`, they are words, and
`exact` says so.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from corral.client.client import Client
from corral.client.errors import RequestError

WORDS = tuple(
    """a about act add age ago air all also an and any arm art as ask at away bad bag ball bank bar base bed best big
    bit book both box boy but buy by call can car care case cat city cost cup cut dark day deep did die dog door down
    draw dry due each ear east easy eat edge egg end even eye face fact fall far fast feel few fig file fill film find
    fine fire fish fit five flat fly food foot for form four free from full game gas get girl give go goal gold good
    gun hair half hall hand hard has hat have he head hear heat her here high him his hit hold home hot hour how huge
    ice idea if in into iron it its job join jump just keep key kid kind king know lack land last late law lay lead
    leg less let lie life line list live long look lose lot love low main make man many map mark may me mean meet men
    mile mind miss month more most move much must my name near need net new news next night no nor north not note now
    of off oil old on once one only open or our out over own page pair part pass past pay per pick plan play poor
    port post pull push put race rain rate raw read real red rest rich ride right ring rise road rock role roof room
    row rule run sad safe salt same sat save sea seat see sell send set seven shall she ship shop short show shut
    side sign sing sir sit six size skin sky slow small snow so soft soil sold some son song soon sort south star
    stay step still stop sun sure table take talk tax team tell ten test than that the them then they thin this tie
    time tiny to top town tree trip true try turn two type under unit until up us use very view wait wall want war
    warm was wash way we wear week well west wet what when who why wide wife will wind win wine wish with wood word
    work yard year yes yet you young""".split()  # noqa: SIM905 - a page of quotes helps nobody
)
_ANCHOR = "the"


@dataclass(frozen=True)
class Vocabulary:
    """What random prompts are made of."""

    words: tuple[str, ...]
    added: int = 0  # tokens the server puts around a text
    ids: tuple[int, ...] = ()  # used instead of words when not empty
    exact: bool = True
    note: str = ""

    def draw(self, count: int, dice: random.Random) -> str | list[int]:
        """A prompt of `count` tokens, counted as the server counts them."""
        if self.ids:
            return dice.choices(self.ids, k=count)
        return " ".join(dice.choices(self.words, k=max(1, count - self.added)))


async def _count(client: Client, text: str) -> tuple[int, list[int]]:
    page = await client.page("/tokenize", {"model": client.endpoint.model, "prompt": text}, timeout_s=30)
    if page.status != 200:
        raise LookupError(page.status)
    body = page.json()
    return int(body["count"]), list(body["tokens"])


async def learn_vocabulary(client: Client, candidates: tuple[str, ...] = WORDS) -> Vocabulary:
    """Ask the server which words are one token."""
    try:
        alone, _ = await _count(client, _ANCHOR)
        pairs = await asyncio.gather(*(_count(client, f"{_ANCHOR} {word}") for word in candidates))
        starts = await asyncio.gather(*(_count(client, word) for word in candidates))
        single = tuple(
            word
            for word, (pair, _), (start, _) in zip(candidates, pairs, starts, strict=True)
            if pair == alone + 1 and start == alone
        )
        added = alone - 1
        if len(single) >= 64:
            text = " ".join(random.Random(1).choices(single, k=200))  # noqa: S311
            if (await _count(client, text))[0] == 200 + added:
                return Vocabulary(single, added)
        seen = sorted({token for _, tokens in pairs for token in tokens[added:]})
    except (LookupError, RequestError, ValueError, KeyError, TypeError):
        note = "the server has no /tokenize: prompts are words, and their token counts are the server's own"
        return Vocabulary(candidates, exact=False, note=note)
    note = "the tokenizer does not split at words: prompts are token ids"
    return Vocabulary(candidates, ids=tuple(seen), note=note)
