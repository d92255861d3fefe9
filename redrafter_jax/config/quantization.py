"""Which weights of a model are quantized, and to which format."""

from dataclasses import dataclass

from redrafter_jax.config.limits import Checked
from redrafter_jax.config.target import WeightFormat


@dataclass(frozen=True)
class Quantization(Checked):
    """Weight formats by part of the model; None leaves the part unquantized.

    Norms and biases are never quantized.

    Attributes:
      layers: format of all matrices other than the embedding and the vocabulary projection.
      embedding: format of a target's embedding, and of its vocabulary projection if the two are
        tied.
      head: format of the vocabulary projection of a target or a drafter.
    """

    layers: WeightFormat | None = None
    embedding: WeightFormat | None = None
    head: WeightFormat | None = None

    @classmethod
    def of(cls, form: WeightFormat) -> "Quantization":
        """Return `form` for the layers, and int8 for the embedding and the vocabulary projection.

        The formats of these two affect the text more than that of the layers.
        """
        return cls(form, "int8", "int8")

    def format_of(self, name: str) -> WeightFormat | None:
        """The format of the matrix with this dotted parameter name; None if it is not quantized."""
        if "embed_tokens" in name:
            return self.embedding
        return self.head if "lm_head" in name.split(".") else self.layers
