"""The bundled toy model, where its distribution `agentsd-demo` is installed beside this one."""

try:
    from agentsd_demo import SUBJECT, Reference, load_pipeline, load_references
except ModuleNotFoundError as error:
    if error.name != "agentsd_demo":
        raise
    raise ModuleNotFoundError(
        "the bundled toy model is a separate package, agentsd-demo: install its wheel beside agentsd's, "
        "or from a clone of the repository `pip install ./demo`",
        name="agentsd_demo",
    ) from None

__all__ = ["SUBJECT", "Reference", "load_pipeline", "load_references"]
