"""Compiles nothing."""

from triton.backends.compiler import BaseBackend


class NothingCompiled(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "cpu"

    def parse_options(self, options):
        return options

    def add_stages(self, stages, options, language):
        raise NotImplementedError

    def load_dialects(self, context):
        raise NotImplementedError

    def get_module_map(self):
        return {}
