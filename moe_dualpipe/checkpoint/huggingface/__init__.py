"""Read and write published models, in the format of Hugging Face that transformers, vLLM and SGLang read.

A table of architectures (architectures.py) maps config.json to `ModelConfig` (config.py), and published tensors to
those of this model (tensors.py). All other modules use these tables.
"""

from ..destinations import CONFIG_FILE
from .architectures import ARCHITECTURES
from .companions import companion_files, fp8_file
from .config import find_architecture, read_config, write_config
from .peft import AdapterPlan, plan_adapter_export
from .published import PublishedModel, from_pretrained
from .save import DTYPES, ExportPlan, plan_checkpoint_export, save_pretrained

__all__ = [
    "ARCHITECTURES", "CONFIG_FILE", "DTYPES", "AdapterPlan", "ExportPlan", "PublishedModel", "companion_files",
    "find_architecture", "fp8_file", "from_pretrained", "plan_adapter_export", "plan_checkpoint_export", "read_config",
    "save_pretrained", "write_config",
]  # fmt: skip
