"""The protobuf messages of the Open Inference Protocol, and of Triton's extension for model repositories.

The messages are in their own descriptor pool. Clients such as ``tritonclient`` register messages with the same names
in the default pool, which accepts each name only once per process.
"""

from typing import Any

from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

PACKAGE = "inference"
SERVICE = "inference.GRPCInferenceService"

# The fields of each message in the order of their numbers. `[]` marks a repeated field, `{}` a map from strings to
# parameters, and `|` the members of a oneof. A message without a dot in its name is at the top level.
_MESSAGES = {
    "InferParameter": "|bool bool_param, |int64 int64_param, |string string_param, |double double_param, "
    "|uint64 uint64_param",
    "InferTensorContents": "bool[] bool_contents, int32[] int_contents, int64[] int64_contents, "
    "uint32[] uint_contents, uint64[] uint64_contents, float[] fp32_contents, double[] fp64_contents, "
    "bytes[] bytes_contents",
    "ServerLiveRequest": "",
    "ServerLiveResponse": "bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "bool ready",
    "ModelReadyRequest": "string name, string version",
    "ModelReadyResponse": "bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "string name, string version, string[] extensions",
    "ModelMetadataRequest": "string name, string version",
    "ModelMetadataResponse": "string name, string[] versions, string platform, "
    "ModelMetadataResponse.TensorMetadata[] inputs, ModelMetadataResponse.TensorMetadata[] outputs",
    "ModelMetadataResponse.TensorMetadata": "string name, string datatype, int64[] shape",
    "ModelInferRequest": "string model_name, string model_version, string id, {} parameters, "
    "ModelInferRequest.InferInputTensor[] inputs, ModelInferRequest.InferRequestedOutputTensor[] outputs, "
    "bytes[] raw_input_contents",
    "ModelInferRequest.InferInputTensor": "string name, string datatype, int64[] shape, {} parameters, "
    "InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "string name, {} parameters",
    "ModelInferResponse": "string model_name, string model_version, string id, {} parameters, "
    "ModelInferResponse.InferOutputTensor[] outputs, bytes[] raw_output_contents",
    "ModelInferResponse.InferOutputTensor": "string name, string datatype, int64[] shape, {} parameters, "
    "InferTensorContents contents",
    "RepositoryIndexRequest": "string repository_name, bool ready",
    "RepositoryIndexResponse": "RepositoryIndexResponse.ModelIndex[] models",
    "RepositoryIndexResponse.ModelIndex": "string name, string version, string state, string reason",
    "RepositoryModelLoadRequest": "string repository_name, string model_name, {} parameters",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "string repository_name, string model_name, {} parameters",
    "RepositoryModelUnloadResponse": "",
}
_SCALARS = ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
)
"""The methods of the gRPC service. The messages of method X are ``XRequest`` and ``XResponse``."""


def _add_field(message: DescriptorProto, number: int, text: str) -> None:
    """Add a field to a message, given its type and name as in :data:`_MESSAGES`."""
    kind, name = text.split()
    field = message.field.add(name=name, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind.startswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
    if kind == "{}":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add_field(entry, 1, "string key")
        _add_field(entry, 2, "InferParameter value")
    if kind == "{}" or kind.endswith("[]"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    kind = kind.removeprefix("|").removesuffix("[]")
    if kind in _SCALARS:
        field.type = getattr(FieldDescriptorProto, f"TYPE_{kind.upper()}")
        return
    field.type = FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{kind}" if kind != "{}" else entry.name


def _classes() -> dict[str, Any]:
    """Return the class of each message, keyed by its name."""
    file = FileDescriptorProto(name="open_inference.proto", package=PACKAGE, syntax="proto3")
    top: dict[str, DescriptorProto] = {}
    for name, fields in _MESSAGES.items():
        outer, _, inner = name.partition(".")
        message = top[outer].nested_type.add(name=inner) if inner else file.message_type.add(name=outer)
        if not inner:
            top[outer] = message
        for number, text in enumerate(filter(None, fields.split(", ")), start=1):
            _add_field(message, number, text)
    pool = DescriptorPool()
    pool.Add(file)
    names = (name for name in _MESSAGES if "." not in name)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in names}


MESSAGES = _classes()
"""The message classes, keyed by name."""
