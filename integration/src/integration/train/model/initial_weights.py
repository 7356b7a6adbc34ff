"""``--init-from``: loads the initial weights from a folder of safetensors."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from torch import nn

from integration.hugging_face import WeightsFolder, load_weights, open_folder, require_fits
from integration.hugging_face.chunks import ParameterChunk, parameter_chunks
from integration.models import ModelShape, build_model_on_meta
from integration.train.config import TrainConfig


@dataclass(frozen=True)
class InitialWeights:
    """A validated folder of weights of a run's model."""

    folder: WeightsFolder
    chunks: Mapping[str, Sequence[ParameterChunk]]

    @staticmethod
    def open(config: TrainConfig, shape: ModelShape) -> "InitialWeights":
        """Opens and validates ``--init-from``; reads headers only.

        Raises:
            UsageError: the folder cannot be read, or contains another model.
        """
        assert config.init_from is not None
        folder = open_folder(config.init_from)
        chunks = parameter_chunks(build_model_on_meta(shape))
        require_fits(folder, chunks, asdict(shape))
        return InitialWeights(folder, chunks)

    def allocate(self, model: nn.Module, device: str) -> None:
        """Allocates a Hugging Face model on meta and computes its buffers, but draws no weights."""
        model.to_empty(device=device)
        for parameter in model.parameters():
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # its initialiser's
        model.init_weights()  # type: ignore[operator]

    def load(self, model: nn.Module) -> None:
        """Loads the weights into a parallelized model; all ranks call it."""
        load_weights(model, self.folder, self.chunks)
