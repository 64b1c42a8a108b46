"""The account of an epoch's tokens, which must close: what the store holds is what was trained or masked."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Ledger:
    """Sums over the steps of the epoch so far, over all ranks.

    `planned` is what the plan meant to train, the rest is counted in the packs that really were: labels that reach
    the loss, and positions whose label is masked because it is context or the first token of a sample.
    """

    documents: int = 0
    empty_documents: int = 0
    planned: int = 0
    trained: int = 0
    masked: int = 0

    def add(self, *, documents: int, empty_documents: int, planned: int, trained: int, masked: int) -> None:
        """Count a step."""
        self.documents += documents
        self.empty_documents += empty_documents
        self.planned += planned
        self.trained += trained
        self.masked += masked

    def close(self, documents: int, tokens: int) -> dict[str, int]:
        """The account against what the store holds; `unexplained` is 0 if no token was lost or trained twice.

        Documents are cut, never truncated, and no step leaves anything over for the next epoch: both are 0.
        """
        account = {
            "documents": self.documents,
            "empty_documents": self.empty_documents,
            "tokens": tokens,
            "trained": self.trained,
            "masked": self.masked,
            "truncated": 0,
            "carried": 0,
        }
        lost = abs(tokens - self.trained - self.masked) + abs(self.planned - self.trained)
        return account | {"unexplained": lost + abs(documents - self.documents)}

    def state_dict(self) -> dict[str, int]:
        """The sums, as JSON values."""
        return asdict(self)
