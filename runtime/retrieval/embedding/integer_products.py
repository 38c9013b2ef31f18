"""The products of an ONNX model whose weights are stored as int8, computed in integers.

```
stored     W = scale · Cast(q)        x @ W in float32, for which four bytes of each weight are read
rewritten  high, s1 = int8 of x       low, s2 = int8 of x - s1 · high
           x @ W = scale · (s1 · (high @ q) + s2 · (low @ q))
```
Both halves of x together have 16 bits, as float16 has at x's largest value; q is exact. Processors with VNNI or AMX
multiply integers several times as fast as float32; without, onnxruntime's products of int8 saturate. What then takes
most of the time beside the products, GELU and the steps of attention, is rewritten too.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

_FIELDS: dict[str, list[tuple[str, int, str]]] = {
    "Model": [("graph", 7, "Graph"), ("opset_import", 8, "Opset*")],
    "Opset": [("domain", 1, "string"), ("version", 2, "int64")],
    "Graph": [("node", 1, "Node*"), ("initializer", 5, "Tensor*"), ("output", 12, "Value*")],
    "Value": [("name", 1, "string")],
    "Node": [
        ("input", 1, "string*"),
        ("output", 2, "string*"),
        ("op_type", 4, "string"),
        ("attribute", 5, "Attribute*"),
        ("domain", 7, "string"),
    ],
    "Attribute": [("name", 1, "string"), ("ints", 8, "int64*"), ("type", 20, "int32")],
    "Tensor": [("dims", 1, "int64*"), ("data_type", 2, "int32"), ("name", 8, "string")],
}
"""Of ONNX's messages, those used here; protobuf keeps the others. *: repeated."""
_INT8, _MICROSOFT = 3, "com.microsoft"
_INTS = 7  # type of an attribute


def has_integer_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies int8 without saturating."""
    try:
        return re.search(r"\b(avx512_vnni|avx_vnni)\b", cpuinfo.read_text(encoding="utf-8")) is not None
    except OSError:
        return False


def with_integer_products(model: bytes) -> bytes:
    """Return an ONNX model with its products by stored int8 weights rewritten, GELU as one operator and attention with
    fewer; it is returned as it is without such products."""
    parsed = _model_class().FromString(model)
    graph = parsed.graph
    _shorten_attention(graph.node)
    stored = {one.name: one for one in graph.initializer}
    made_by = {output: node for node in graph.node for output in node.output}
    used_by: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            used_by.setdefault(name, []).append(node)
    rewritten = type(graph)()
    split: set[str] = set()
    fused = _gelus(graph.node, used_by)
    replaced: set[str] = {name for step in fused.values() for name in step}  # outputs that another node gives

    def add(op_type: str, inputs: list[str], outputs: list[str], domain: str = "") -> None:
        rewritten.node.add(op_type=op_type, input=inputs, output=outputs, domain=domain)

    for node in graph.node:
        product = _weights(node.input[1], made_by, stored) if node.op_type == "MatMul" else None
        if product is None:
            if (y := node.output[0]) in fused:
                add("Gelu", [made_by[fused[y][0]].input[0]], [y], _MICROSOFT)
            elif y not in replaced:
                rewritten.node.append(node)
            continue
        weights, scale = product
        scale.dims[:] = scale.dims[-1:]
        x, y, bias = node.input[0], node.output[0], ""
        if x not in split:
            split.add(x)
            add("DynamicQuantizeLinear", [x], [f"{x}_high", f"{x}_s1", f"{x}_z1"])
            add("DequantizeLinear", [f"{x}_high", f"{x}_s1", f"{x}_z1"], [f"{x}_rounded"])
            add("Sub", [x, f"{x}_rounded"], [f"{x}_rest"])
            add("DynamicQuantizeLinear", [f"{x}_rest"], [f"{x}_low", f"{x}_s2", f"{x}_z2"])
        users = used_by[y]
        if len(users) == 1 and users[0].op_type == "Add":
            (other,) = (name for name in users[0].input if name != y)
            if other in stored and list(stored[other].dims) == [weights.dims[1]]:
                bias, y = other, users[0].output[0]
                replaced.add(y)
        for half, number, beside in (("high", 1, bias), ("low", 2, "")):
            inputs = [f"{x}_{half}", weights.name, f"{x}_s{number}", scale.name, f"{x}_z{number}", "", beside]
            add("MatMulIntegerToFloat", inputs, [f"{y}_{half}"], _MICROSOFT)
        add("Add", [f"{y}_high", f"{y}_low"], [y])
    if not split:
        return model
    used, needed_nodes = {one.name for one in graph.output}, []
    for node in reversed(rewritten.node):
        if not used.isdisjoint(node.output):
            used.update(node.input)
            needed_nodes.append(node)
    graph.ClearField("node")
    graph.node.extend(reversed(needed_nodes))
    if all(one.domain != _MICROSOFT for one in parsed.opset_import):
        parsed.opset_import.add(domain=_MICROSOFT, version=1)
    content: bytes = parsed.SerializeToString()
    return content


def _shorten_attention(nodes: Iterable[Any]) -> None:
    """Transpose the keys in one step, not through a matrix a head whose shape is computed for each layer; and look for
    no NaN after the softmax: what is masked has the least float32, not minus infinity, so there is none."""
    made_by = {output: node for node in nodes for output in node.output}
    for node in nodes:
        way, at = [node.op_type], node
        while len(way) < 4 and at.input and (at := made_by.get(at.input[0])) is not None:
            way.append(at.op_type)
        if way == ["Reshape", "Transpose", "Reshape", "Transpose"]:
            node.op_type, node.input[:] = "Transpose", [at.output[0]]
            node.ClearField("attribute")
            node.attribute.add(name="perm", ints=[0, 1, 3, 2], type=_INTS)
        elif way[:3] == ["Where", "IsNaN", "Softmax"]:
            node.op_type, node.input[:] = "Identity", [node.input[2]]


def _gelus(nodes: Iterable[Any], used_by: dict[str, list[Any]]) -> dict[str, list[str]]:
    """Return the outputs x · (½ · (erf(x / √2) + 1)), an order that onnxruntime does not fuse, and what is computed on
    the way to each, the quotient first. The constants are not looked at: only MiniLM is rewritten."""
    gelus = {}
    for node in nodes:
        way, at = [], node
        for op_type in ("Div", "Erf", "Add", "Mul"):
            users = used_by.get(at.output[0], [])
            if at.op_type != op_type or len(users) != 1:
                break
            way.append(at.output[0])
            at = users[0]
        else:
            if at.op_type == "Mul" and node.input[0] in at.input:
                gelus[at.output[0]] = way
    return gelus


def _weights(name: str, made_by: dict[str, Any], stored: dict[str, Any]) -> tuple[Any, Any] | None:
    """Return int8 weights [k, n] and their scale by column, if `name` is the product of both."""
    scaled = made_by.get(name)
    if scaled is None or scaled.op_type != "Mul":
        return None
    cast = made_by.get(scaled.input[0])
    if cast is None or cast.op_type != "Cast":
        return None
    weights, scale = stored.get(cast.input[0]), stored.get(scaled.input[1])
    if weights is None or scale is None or weights.data_type != _INT8 or len(weights.dims) != 2:
        return None
    return (weights, scale) if list(scale.dims) in ([1, weights.dims[1]], [weights.dims[1]]) else None


@cache
def _model_class() -> Any:
    """Return a class for ONNX's outermost message."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    field_type: Any = descriptor_pb2.FieldDescriptorProto
    file: Any = descriptor_pb2.FileDescriptorProto(name="onnx.proto", package="onnx", syntax="proto2")
    for message, fields in _FIELDS.items():
        described = file.message_type.add(name=message)
        for field, number, kind in fields:
            label = field_type.LABEL_REPEATED if kind.endswith("*") else field_type.LABEL_OPTIONAL
            declared = described.field.add(name=field, number=number, label=label)
            if (kind := kind.rstrip("*")) in _FIELDS:
                declared.type, declared.type_name = field_type.TYPE_MESSAGE, f".onnx.{kind}"
            else:
                declared.type = field_type.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("onnx.Model"))
