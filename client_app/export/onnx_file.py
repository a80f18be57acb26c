"""Export to ONNX: a graph with named inputs, probabilities or values, and the class as a string."""

import io
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

from posy.client_app.export.check import ExportError, compare
from posy.client_app.export.graph import RawModel, codes_of, columns_by_input
from posy.client_app.export.programs import SAMPLES, exported_program, tracing
from posy.client_app.export.samples import network_inputs, random_check
from posy.client_app.schema import TensorSpec, input_specs, output_specs
from posy.client_app.stored import ClientModel
from posy.data.encoding import EncodedColumn
from posy.data.inputs import Preprocessing

OUTPUTS, ML = "outputs", "ai.onnx.ml"
OPSET, ML_OPSET = 17, 2
"""Versions of the operators, which onnxruntime has supported since 1.12."""
_PREFIX = "network/"
_TYPES = {
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "INT64": TensorProto.INT64,
    "UINT8": TensorProto.UINT8,
    "BYTES": TensorProto.STRING,
}
"""The ONNX types of the Open Inference Protocol's types."""


def write(model: ClientModel, card: Mapping[str, Any], path: Path, *, dynamo: bool) -> float:
    """Write a model to an ONNX file, and return its largest difference from the stored model.

    ``dynamo`` selects PyTorch's newer exporter, which supports more networks but takes longer.

    Raises
    ------
    ExportError
        If the file's outputs differ from the stored model's.
    Exception
        If PyTorch cannot export the network.
    """
    preprocessing = model.preprocessing
    encoder = preprocessing.encoder
    names = list(columns_by_input(encoder)) if encoder else [input_specs(preprocessing)[0].name]
    examples = network_inputs(preprocessing, random_check(model).inputs)
    content = (_by_dynamo if dynamo else _by_tracing)(RawModel(model), examples, names)
    onnx.save(_complete(content, preprocessing, names, card), path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    outputs, *labels = [spec.name for spec in output_specs(preprocessing)]

    def run(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        rows, *classes = session.run([outputs, *labels], dict(inputs))
        expected = [model.class_names[number] for number in rows.argmax(axis=1)]
        if any(list(array) != expected for array in classes):
            raise ExportError("its classes are not the most probable classes")
        return np.asarray(rows)

    return compare(model, run)


def _by_tracing(raw: RawModel, examples: tuple[Tensor, ...], names: list[str]) -> onnx.ModelProto:
    """Return the graph that PyTorch's exporter for TorchScript records."""
    file = io.BytesIO()
    axes = {name: {0: SAMPLES} for name in (*names, OUTPUTS)}
    options: dict[str, Any] = {"input_names": names, "output_names": [OUTPUTS], "dynamic_axes": axes, "f": file}
    with tracing(raw, examples):
        torch.onnx.export(raw, examples, dynamo=False, opset_version=OPSET, **options)
    return onnx.load_from_string(file.getvalue())


def _by_dynamo(raw: RawModel, examples: tuple[Tensor, ...], names: list[str]) -> onnx.ModelProto:
    """Return the graph that PyTorch's exporter for exported programs records."""
    program = exported_program(raw, examples)
    options: dict[str, Any] = {"input_names": names, "output_names": [OUTPUTS]}
    converted = torch.onnx.export(program, dynamo=True, verbose=False, **options)
    assert converted is not None
    model: onnx.ModelProto = converted.model_proto
    return model


def _complete(
    model: onnx.ModelProto, preprocessing: Preprocessing, names: list[str], card: Mapping[str, Any]
) -> onnx.ModelProto:
    """Return the graph with the schema's inputs and outputs, and with the card as metadata."""
    inputs, outputs = input_specs(preprocessing), output_specs(preprocessing)
    _rename(model.graph)
    for node in (node for function in model.functions for node in function.node):
        _strip(node)
    before = list(itertools.chain.from_iterable(_encode(preprocessing, name) for name in names))
    source = f"{_PREFIX}{OUTPUTS}"
    after = [helper.make_node("Identity", [source], [outputs[0].name])]
    if len(outputs) > 1:
        index = f"{_PREFIX}class"
        after.append(helper.make_node("ArgMax", [source], [index], axis=1, keepdims=0))
        after.append(
            helper.make_node(
                "LabelEncoder", [index], [outputs[1].name], domain=ML, default_string="",
                keys_int64s=list(range(len(preprocessing.task.class_names))),
                values_strings=list(preprocessing.task.class_names),
            )
        )  # fmt: skip
    axis = [helper.make_tensor(f"{_PREFIX}axis", TensorProto.INT64, [1], [1])] if preprocessing.encoder else []
    graph = helper.make_graph(
        [*before, *model.graph.node, *after],
        "posy",
        [_value(spec) for spec in inputs],
        [_value(spec) for spec in outputs],
        [*model.graph.initializer, *axis],
    )
    opsets = {entry.domain: entry.version for entry in model.opset_import} | {ML: ML_OPSET}
    complete = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        functions=list(model.functions),
        ir_version=model.ir_version,
        producer_name="posy",
        producer_version=str(card["posy"]),
        doc_string=f"{card['method']}, client {card['client']}, {card['point']} model of round {card['round']}",
    )
    helper.set_model_props(complete, {"posy": json.dumps(card, ensure_ascii=False)})
    onnx.checker.check_model(complete)
    return complete


def _encode(preprocessing: Preprocessing, name: str) -> list[onnx.NodeProto]:
    """Return the nodes that connect the schema's inputs to an input of the network."""
    target = f"{_PREFIX}{name}"
    if not preprocessing.encoder:
        return [helper.make_node("Identity", [name], [target])]
    nodes, parts = [], []
    for number, column in enumerate(columns_by_input(preprocessing.encoder)[name]):
        source, part = column.name, f"{target}/{number}"
        if column.mean is None:
            source = f"{part}/code"
            nodes.append(_code_node(column, source))
        nodes.append(helper.make_node("Unsqueeze", [source, f"{_PREFIX}axis"], [part]))
        parts.append(part)
    return [*nodes, helper.make_node("Concat", parts, [target], axis=1)]


def _code_node(column: EncodedColumn, target: str) -> onnx.NodeProto:
    """Return the node that maps a column's strings to their codes."""
    codes = codes_of(column)
    attributes: dict[str, Any] = {"keys_strings": list(codes), "values_int64s": list(codes.values())}
    default = len(column.categories)
    return helper.make_node("LabelEncoder", [column.name], [target], domain=ML, default_int64=default, **attributes)


def _value(spec: TensorSpec) -> onnx.ValueInfoProto:
    """Return an input or output of the graph."""
    shape: list[str | int | None] = [SAMPLES, *spec.shape[1:]]
    return helper.make_tensor_value_info(spec.name, _TYPES[spec.datatype], shape, doc_string=spec.description)


def _rename(graph: onnx.GraphProto) -> None:
    """Prefix all names, and remove the exporter's comments, which contain the paths of source files."""
    for entry in (*graph.input, *graph.output, *graph.initializer):
        entry.name = _PREFIX + entry.name
    del graph.value_info[:]
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [name and _PREFIX + name for name in names]  # an optional input may have no name
        _strip(node)
        for attribute in node.attribute:
            for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                _rename(inner)


def _strip(node: onnx.NodeProto) -> None:
    node.doc_string = ""
    del node.metadata_props[:]
