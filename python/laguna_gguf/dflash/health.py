"""Noticing a drafter that does not work: its text is right all the same, only slow, so nobody would look for it."""

import logging
from dataclasses import dataclass

MIN_ROUNDS = 32
MIN_DRAFTED = 100
LOWEST_RATE = 0.02
"""Working pairs accept a third of their drafts and more; chance accepts about one in a vocabulary."""

_LOGGER = logging.getLogger("laguna_gguf")

_CAUSES = (
    "the drafter is of another release or size than the target (laguna-gguf inspect shows what it expects)",
    "the target's weights were rotated when it was quantised (some INT4 builds), so that its hidden states are not "
    "those that the drafter was trained on",
    "the prompt does not follow the chat template or thinking mode that the drafter was trained on",
    "the drafter's norms, captured layers or window were lost in a conversion (convert it again from its safetensors)",
)


def low_acceptance(
    rounds: int,
    drafted: int,
    accepted: int,
    *,
    min_rounds: int = MIN_ROUNDS,
    min_drafted: int = MIN_DRAFTED,
    lowest_rate: float = LOWEST_RATE,
) -> str | None:
    """What to tell the user about `accepted` of `drafted` tokens in `rounds` verify rounds; None when there is nothing.

    Nothing is said before `min_rounds` rounds with drafts and `min_drafted` drafted tokens.
    """
    if rounds < min_rounds or drafted < min_drafted or accepted >= lowest_rate * drafted:
        return None
    causes = "; ".join(f"({number}) {cause}" for number, cause in enumerate(_CAUSES, 1))
    return (
        f"the target accepted {accepted} of {drafted} drafted tokens ({accepted / drafted:.1%}) in the first {rounds} "
        f"rounds. The text is right, but drafting only costs time. Likely causes: {causes}"
    )


@dataclass
class AcceptanceWatch:
    """Counts the first rounds of a session and logs one warning, ever, if hardly any draft was accepted in them.

    The verdict is passed once, as soon as there are enough rounds: text that is hard to draft later says nothing about
    the drafter.
    """

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    decided: bool = False

    def update(self, drafted: int, accepted: int) -> None:
        """One more verify round; rounds without a draft do not count."""
        if self.decided or drafted == 0:
            return
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        if self.rounds < MIN_ROUNDS or self.drafted < MIN_DRAFTED:
            return
        self.decided = True
        message = low_acceptance(self.rounds, self.drafted, self.accepted)
        if message is not None:
            _LOGGER.warning("%s", message)
