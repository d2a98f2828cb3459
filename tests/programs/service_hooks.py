"""An instrumentation of `service` that uses every way of hooking there is."""

from rltrace.record import spans


class ServiceHooks:
    """All kinds of hooks."""

    name = "service"
    supports = ()

    def install(self, patches):
        """Name the hooks."""
        service = "service:Service"
        patches.around(f"{service}.__init__", lambda args, kwargs: None, lambda token, result, error: None)
        patches.span(f"{service}.named", "service.named", lambda *args: {"args": len(args)})
        patches.span(f"{service}.doubled", "service.doubled", late_args=lambda result, value: {"result": result})
        key = "service:{}".format
        for name in ("add", "fetch", "fetch_later", "count", "stream", "opened", "connected"):
            patches.span(
                f"{service}.{name}", f"service.{name}", described, concluded,
                flow_out=lambda _self, *_, **__: key("out"), flow_in=lambda _self, *_, **__: key("in"),
            )  # fmt: skip
        patches.span(f"{service}.items", "service.item", described, concluded, each_item=True)
        patches.use("service:Service.add", register)


def described(_self, *args, **kwargs):
    return {"args": len(args) + len(kwargs)}


def concluded(result, _self, *_args, **_kwargs):
    return {"result": str(result)}


def register(hook):
    spans.counter("service.registered", 1)
    return lambda: None
