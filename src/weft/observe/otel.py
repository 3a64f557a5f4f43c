"""Versions as OpenTelemetry spans (needs weft[otel]).

    with span_exporter() as export:              # OTEL_EXPORTER_OTLP_ENDPOINT and its relatives say where to
        export(record)                           # a version of an events file: one trace

The version is the root of its trace; what each member did are its children.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weft.errors import ConfigError
from weft.observe.version_trace import version_spans
from weft.observe.why import explain


@contextlib.contextmanager
def span_exporter() -> Iterator[Callable[[Mapping[str, Any]], int]]:
    """A function that exports one version and returns how many spans it has; all are sent at the end."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError("spans need OpenTelemetry", hint="pip install 'weft[otel]'") from error
    provider = TracerProvider(resource=Resource.create({"service.name": "weft"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracer = provider.get_tracer("weft")
    try:
        yield lambda record: _export(tracer, record)
    finally:
        provider.shutdown()


def _export(tracer: Any, record: Mapping[str, Any]) -> int:
    from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 - an extra

    began = float(record["at"]) - float(record["seconds"])
    spans = version_spans(record, at_s=began)
    explanation = explain(record)
    facts = {"weft.version": explanation.version, "weft.outcome": explanation.outcome, "weft.why": explanation.sentence}
    root = tracer.start_span(f"version {explanation.version}", start_time=_ns(began), attributes=facts)
    inside = set_span_in_context(root)
    children = [span for span in spans if span.lane not in {"versions", "chain"}]
    for span in children:
        facts = {"weft.member": span.member, "weft.bytes": span.num_bytes, "weft.peer": span.peer}
        child = tracer.start_span(
            f"{span.member}: {span.name}", context=inside, start_time=_ns(span.start_s), attributes=facts
        )
        child.end(end_time=_ns(span.start_s + span.duration_s))
    root.end(end_time=_ns(float(record["at"])))
    return len(children) + 1


def _ns(at_s: float) -> int:
    return round(at_s * 1e9)
