"""Which weights of a model are quantized, and how."""

from dataclasses import dataclass

from redrafter_jax.config.limits import Checked
from redrafter_jax.config.target import WeightFormat


@dataclass(frozen=True)
class Quantization(Checked):
    """Formats of a model's matrices by where they stand; None leaves them plain.

    Norms and biases are always plain.

    Attributes:
      layers: format of all matrices but the two below.
      embedding: format of a target's embedding, and of its vocabulary projection if they are tied.
      head: format of the vocabulary projection of a target or a drafter.
    """

    layers: WeightFormat | None = None
    embedding: WeightFormat | None = None
    head: WeightFormat | None = None

    @classmethod
    def of(cls, form: WeightFormat) -> "Quantization":
        """The usual formats: embedding and head keep 8 bits, for they change the text more."""
        return cls(form, "int8", "int8")

    def format_of(self, name: str) -> WeightFormat | None:
        """The format of a matrix, by its parameter's dotted name; None for plain."""
        if "embed_tokens" in name:
            return self.embedding
        return self.head if "lm_head" in name.split(".") else self.layers
