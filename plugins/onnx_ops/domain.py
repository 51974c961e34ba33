"""The ONNX domain of our graph ops, its versions, and the ops' schemas for ONNX, made of our own."""

from __future__ import annotations

from onnx import defs, helper

from outrider.plugins.schema import AttributeSpec, OpSchema, TensorSpec

DOMAIN = "outrider"
VERSION = 1
OPSET = 24  # the standard opset of the function bodies, the first opset with TensorScatter


def onnx_schema(schema: OpSchema) -> defs.OpSchema:
    """Return an op's schema for ONNX.

    Tensors that may be of several types share a type variable where these are the same.
    """
    kinds = sorted({spec.dtype for spec in (*schema.inputs, *schema.outputs)})
    variables = {kind: f"T{number}" for number, kind in enumerate(kinds)}

    def parameter(spec: TensorSpec) -> defs.OpSchema.FormalParameter:
        options = defs.OpSchema.FormalParameterOption
        option = options.Optional if spec.optional else options.Single
        shape = f"[{', '.join(map(str, spec.shape))}]"
        return defs.OpSchema.FormalParameter(spec.name, variables[spec.dtype], shape, param_option=option)

    def attribute(spec: AttributeSpec) -> defs.OpSchema.Attribute:
        if spec.default is not None:
            return defs.OpSchema.Attribute(spec.name, helper.make_attribute(spec.name, spec.default))
        kind = defs.OpSchema.AttrType.INT if spec.kind is int else defs.OpSchema.AttrType.FLOAT
        return defs.OpSchema.Attribute(spec.name, kind)

    return defs.OpSchema(
        schema.name,
        DOMAIN,
        VERSION,
        doc=schema.doc,
        inputs=[parameter(spec) for spec in schema.inputs],
        outputs=[parameter(spec) for spec in schema.outputs],
        type_constraints=[(variables[kind], _tensor_types(kind), kind) for kind in kinds],
        attributes=[attribute(spec) for spec in schema.attributes],
    )


def _tensor_types(dtype: str) -> list[str]:
    return [f"tensor({'float' if kind == 'float32' else kind})" for kind in dtype.split(" | ")]
