"""Knows the models and optimizers of this process: which tensors are whose, and their bytes on the GPU and the host.

It meets models that FSDP shards, that DDP wraps or that a framework names (`named_models.py`), whatever else an
optimizer holds and, in a loop that no hook knows, each model that computes. Any other is not met, and its bytes are
`unattributed`. The samples at phase boundaries and the history of allocations ask here.

Source read: torch 2.6 to 2.13, torch/distributed/fsdp/_fully_shard and _flat_param.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import repeat
from operator import attrgetter, is_not, methodcaller
from typing import Any

from rltrace.events import HOST_BYTES, PINNED_BYTES, REWARD_MODELS
from rltrace.hooks.arguments import keep_self
from rltrace.hooks.hook import After, Function, Hook
from rltrace.hooks.patching import PatchSet
from rltrace.hooks.wrapping import wrap_function
from rltrace.host import memory
from rltrace.instrument.memory.work import ACTOR, REF, REWARD, WORK, Work, is_trained, trained_subject
from rltrace.instrument.torch.fsdp1 import WRAPPER
from rltrace.instrument.torch.fsdp2 import PACKAGE, groups_of

Rows = dict[str, int]
"""The bytes by the name of the counter, such as `actor.params_bytes`."""

ENGINES = ("vllm", "sglang")
"""Packages whose models are an engine's: it has other owners."""

MOST_KEPT = 64
"""How many states of all groups are kept; a step goes through fewer than ten."""


class Roles:
    """Says whose parameters are: a framework's hook said so when they were made, or they are the actor's or the ref's.

    Parameters that are sharded together are the actor's if an optimizer holds any of them, unless the optimizer is said
    to be somebody else's. Else they are the ref's. Before there is an optimizer, those that can be trained are the
    actor's; once they were trained, they stay the actor's.
    """

    def __init__(self, work: Work) -> None:
        """Args:
        work: Says to whom the models and optimizers belong that are made now.
        """
        self.work = work
        self._named: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """The owners of optimizers and holders of parameters that were made while somebody was worked for."""
        self._optimizers: list[weakref.ref[Any]] = []
        """A list, because each look goes through it, and a set of weak references does that in Python."""
        self.met = 0
        """How many optimizers were met. While that stays the same, no parameter changes its owner."""
        self._decided: weakref.WeakKeyDictionary[Any, tuple[bool, int]] = weakref.WeakKeyDictionary()

    def meet_optimizer(self, optimizer: Any) -> None:
        """Meet an optimizer; the owner of its parameters is asked when it is used."""
        known = self.optimizers()
        if all(one is not optimizer for one in known):
            self._optimizers = [weakref.ref(one) for one in (*known, optimizer)]
            self.name(optimizer, self.work.subject)
            self.met += 1

    def name(self, made: Any, subject: str | None) -> None:
        """Set the owner of an optimizer or of a holder of parameters, where it is known."""
        if made is not None and subject is not None:
            self._named[made] = subject

    def learns(self, module: Any) -> None:
        """Let a model be the actor's, unless somebody has said whose it is."""
        if self._named.get(module) in (None, REWARD):
            self._named[module] = ACTOR
            self.met += 1

    def optimizers(self) -> list[Any]:
        """Return the optimizers that there are."""
        return [one for known in self._optimizers if (one := known()) is not None]

    def subject_of(self, params: Params) -> str:
        """Return `actor`, `ref`, or the owner that somebody has set."""
        holder = params.holder()
        named = self._named.get(holder) if holder is not None and self._named else None
        return named or (ACTOR if self._is_trained(params) else REF)

    def states_owner(self, optimizer: Any) -> str:
        """Return the owner of an optimizer's states."""
        return f"{trained_subject(self._named.get(optimizer))}.optimizer"

    def _is_trained(self, params: Params) -> bool:
        holder = params.holder()
        is_trained, met = self._decided.get(holder, (False, 0)) if holder is not None else (False, 0)
        if is_trained:
            return True
        optimizers = [one for one in self.optimizers() if self._named.get(one, ACTOR) == ACTOR]
        if not optimizers:
            return any(parameter.requires_grad for parameter in params.trained())
        if holder is not None and met != self.met:
            groups = [group for optimizer in optimizers for group in optimizer.param_groups]
            held = {id(parameter) for group in groups for parameter in group["params"]}
            is_trained = any(id(parameter) in held for parameter in params.trained())
            self._decided[holder] = is_trained, self.met
        return is_trained


class Models:
    """The models of a process and their optimizers.

    A call returns the bytes of parameters, gradients and optimizer states by owner.
    """

    def __init__(self, roles: Roles) -> None:
        """Args:
        roles: Says whose they are.
        """
        self.roles = roles
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        """States and modules that were met; several instrumentations tell of each."""
        self._learning: weakref.WeakSet[Any] = weakref.WeakSet()
        """Modules that have computed with gradients."""
        self._units: list[Unit] = []
        self._wrapped: list[weakref.ref[Any]] = []
        """The modules that DDP wraps, and those that somebody names."""
        self._used: list[weakref.ref[Any]] = []
        """Whole models that compute, wrapped or not."""
        self._roots: weakref.WeakKeyDictionary[Any, NamedRoot] = weakref.WeakKeyDictionary()
        """The roots of modules that somebody names, which are kept only here."""
        self._on_root: list[Callable[[NamedRoot], None]] = []
        self._known: tuple[Any, list[tuple[str, Params]]] = None, []
        self._rows: dict[Any, Rows] = {}
        """Rows by the marks of all groups. A step goes through a few of these, and the next step through the same."""
        self._few: list[int] = []
        """The places of groups that stand for all: of each kind the first and the last."""
        self._rows_by_few: dict[Any, Rows] = {}
        """Rows by the marks of these few, as they were when all groups were last looked at."""
        self._states: dict[int, tuple[weakref.ref[Any], tuple[int, int], Rows]] = {}
        """What an optimizer's state held, by the optimizer's id."""

    @property
    def met(self) -> bool:
        """Whether any model was met."""
        return bool(self._units or self._wrapped or self._used or self.roles.met)

    def meet_state(self, state: Any) -> None:
        """Meet an FSDP2 state; its parameters are in groups that are made after it."""
        if self._is_new(state):
            self._units.append(Unit(state, fsdp2_params, lambda state: state._modules, self.roles))

    def meet_fsdp1(self, module: Any) -> None:
        """Meet a module that FSDP1 wraps."""
        if self._is_new(module):
            self._units.append(Unit(module, fsdp1_params, lambda module: [module], self.roles))

    def meet_ddp(self, wrapper: Any) -> None:
        """Meet a module that DDP wraps, with its frozen parameters."""
        if self._is_new(wrapper):
            self._add_whole(wrapper.module, self.roles.work.subject)

    def meet_named(self, module: Any, subject: str) -> None:
        """Meet a module whose owner somebody names; the first one to do so is right."""
        if module not in self._roots:
            root = self._roots[module] = NamedRoot(module, subject)
            self._add_whole(module, subject)
            for on_root in self._on_root:
                on_root(root)

    def meet_used(self, module: Any, *, has_gradients: bool) -> None:
        """Meet a whole model that computes in a loop that no hook knows.

        It is the actor's once it has computed with gradients: DeepSpeed's optimizers hold copies of what learns. Else
        it is a reward model by its class, or the optimizers decide.
        """
        if type(module).__module__.partition(".")[0] in ENGINES:
            return
        if self._is_new(module):
            self._used.append(weakref.ref(module))
            scores = any(part in type(module).__name__ for part in REWARD_MODELS)
            self.roles.name(module, REWARD if scores else self.roles.work.subject)
        if has_gradients and module not in self._learning and any(one.requires_grad for one in module.parameters()):
            self._learning.add(module)
            self.roles.learns(module)

    def _add_whole(self, module: Any, subject: str | None) -> None:
        if all(known() is not module for known in self._wrapped):
            self._wrapped.append(weakref.ref(module))
        self.roles.name(module, subject)

    def watch_named(self, on_root: Callable[[NamedRoot], None]) -> Callable[[], None]:
        """Call this with every module that is named, and with those that were; return what undoes it."""
        self._on_root.append(on_root)
        for root in list(self._roots.values()):
            on_root(root)
        return lambda: self._on_root.remove(on_root)

    def _is_new(self, model: Any) -> bool:
        is_new = model not in self._met
        self._met.add(model)
        return is_new

    def tensors(self) -> Iterator[tuple[str, Iterable[Any]]]:
        """Return the owners, each with the tensors that it owns now."""
        for subject, params in self._groups():
            yield from by_owner(subject, params)
        for optimizer in self.roles.optimizers():
            yield self.roles.states_owner(optimizer), memory.optimizer_tensors(optimizer)

    def modules(self) -> list[Any]:
        """Return the modules whose forwards compute: those that are sharded, wrapped by DDP, or named.

        DDP's own module is not one, because its forward may make the buckets of its gradients anew. A module that has
        only parameters of `unwrapped` is missing, because nothing leads from a parameter to its modules.
        """
        return [*(module for unit in self._units for module in unit.modules()), *self._wrapped_modules()]

    def unwrapped(self) -> list[Any]:
        """Return the parameters that learn and that are in no module that is sharded or wrapped by DDP."""
        wrapped = {id(module) for module in self._wrapped_modules()}
        learning = [
            params for subject, params in self._groups() if isinstance(params, PlainParams) and is_trained(subject)
        ]
        plain = [params for params in learning if id(params.holder()) not in wrapped]
        return [one for params in plain for one in params.trained() if one.requires_grad]

    def _wrapped_modules(self) -> list[Any]:
        return [module for known in self._wrapped if (module := known()) is not None]

    def __call__(self) -> Rows:
        groups = self._groups()
        marks = tuple([params.mark() for _, params in groups])
        rows = self._rows.get(marks) or self._count(groups, marks)
        if len(self._rows_by_few) >= MOST_KEPT:
            self._rows_by_few.clear()
        self._rows_by_few[tuple([marks[place] for place in self._few])] = rows
        return self._with_states(rows)

    def between_passes(self) -> Rows:
        """Return the same where no pass is under way, without a look at every group of parameters.

        Groups of one kind, such as those of a model's layers, go through the same states. So the first and the last of
        each kind stand for all of them, as they were when all were last looked at with these few in this state.
        """
        groups = self._groups()
        rows = self._rows_by_few.get(tuple([groups[place][1].mark() for place in self._few]))
        return self() if rows is None else self._with_states(rows, may_have_moved=False)

    def _with_states(self, rows: Rows, *, may_have_moved: bool = True) -> Rows:
        rows = dict(rows)
        for optimizer in self.roles.optimizers():
            add(rows, self._state_rows(optimizer, may_have_moved))
        return rows

    def _groups(self) -> list[tuple[str, Params]]:
        """Return the owner of each group of parameters, looked up again when that may have changed."""
        held = sum(len(group["params"]) for optimizer in self.roles.optimizers() for group in optimizer.param_groups)
        key = len(self._units), len(self._wrapped), len(self._used), len(self._roots), self.roles.met, held
        if self._known[0] != key or not self.roles.met:
            sharded = [params for unit in self._units for params in unit.params()]
            groups = [*sharded, *plain_params(sharded, self._holders())]
            self._name(sharded)
            self._known = key, [(self.roles.subject_of(params), params) for params in groups]
            for subject, params in self._known[1]:
                params.say_learns(is_trained(subject))
            self._few = ends_of_kinds([(subject, params.kind()) for subject, params in self._known[1]])
            self._rows.clear()
            self._rows_by_few.clear()
        return self._known[1]

    def _name(self, sharded: list[Params]) -> None:
        """Give parameters that are sharded together the owner that somebody has named for their model."""
        if sharded and self._roots:
            roots = list(self._roots.items())
            named = {id(parameter): root.subject for module, root in roots for parameter in module.parameters()}
            for params in sharded:
                self.roles.name(
                    params.holder(), next((named[id(one)] for one in params.trained() if id(one) in named), None)
                )

    def _holders(self) -> Iterator[tuple[Any, list[Any]]]:
        """Return who may have parameters that are not sharded, and which these are."""
        for module in self._wrapped_modules():
            yield module, list(module.parameters())
        used = [(module, list(module.parameters())) for known in self._used if (module := known()) is not None]
        yield from sorted(used, key=lambda one: -len(one[1]))  # a whole model before a part that was put aside
        for optimizer in self.roles.optimizers():
            yield optimizer, [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def _count(self, groups: list[tuple[str, Params]], marks: Any) -> Rows:
        """Return the bytes of parameters and gradients, kept for when all groups are in the same state again."""
        if len(self._rows) >= MOST_KEPT:
            self._rows.clear()
        rows = self._rows[marks] = {}
        for subject, params in groups:
            for owner, tensors in by_owner(subject, params):
                add(rows, by_place(owner, tensors))
        return rows

    def _state_rows(self, optimizer: Any, may_have_moved: bool) -> Rows:
        """Return the bytes of an optimizer's state, which are counted anew when it has grown or moved."""
        known = self._states.get(id(optimizer))
        is_known = known is not None and known[0]() is optimizer
        if known is not None and is_known and not may_have_moved and known[1][0] == len(optimizer.state):
            return known[2]
        key = len(optimizer.state), place_of_state(optimizer)
        if known is None or not is_known or known[1] != key:
            rows = by_place(self.roles.states_owner(optimizer), memory.optimizer_tensors(optimizer))
            known = self._states[id(optimizer)] = weakref.ref(optimizer), key, rows
        return known[2]


def place_of_state(optimizer: Any) -> int:
    """Return where the first tensor of an optimizer's state lies, which stands for all; 0 without any."""
    tensors: Iterable[Any] = next(iter(optimizer.state.values()), {}).values()
    first = next((memory.local(tensor) for tensor in tensors if memory.has_storage(tensor) and tensor.ndim), None)
    return 0 if first is None else int(first.data_ptr())


def ends_of_kinds(kinds: list[Any]) -> list[int]:
    """Return the places of the first and the last of each kind."""
    firsts = {kind: place for place, kind in reversed([*enumerate(kinds)])}
    lasts = {kind: place for place, kind in enumerate(kinds)}
    return sorted({*firsts.values(), *lasts.values()})


MODELS = Models(Roles(WORK))
"""The models of this process."""


def watch_models(patches: PatchSet, on_state: Callable[[Any, Hook], None] | None = None) -> None:
    """Meet every model and every optimizer where it is made.

    Args:
        patches: Whose hooks these are.
        on_state: Called besides with each FSDP2 state and the hook that met it, and with each `NamedRoot`.
    """

    def watch_states(original: Function, hook: Hook) -> Function:
        def met(state: Any) -> None:
            MODELS.meet_state(state)
            if on_state is not None:
                on_state(state, hook)

        return wrap_function(original, hook, keep_self, when_made(met))

    patches.wrap(f"{PACKAGE}._fsdp_state:FSDPState.init", watch_states)
    if on_state is not None:
        patches.use(
            "torch.nn.modules.module:Module.register_forward_pre_hook",
            lambda hook: MODELS.watch_named(lambda root: on_state(root, hook)),
        )
    for target, meet in (
        (f"{WRAPPER}.__init__", MODELS.meet_fsdp1),
        ("torch.nn.parallel.distributed:DistributedDataParallel.__init__", MODELS.meet_ddp),
        ("torch.optim.optimizer:Optimizer.__init__", MODELS.roles.meet_optimizer),
    ):
        patches.around(target, keep_self, when_made(meet))


class NamedRoot:
    """A model that a framework names, in the form of a root's FSDP2 state. Nobody wraps it, so it is its own root."""

    def __init__(self, module: Any, subject: str) -> None:
        self._known = weakref.ref(module)
        self.subject = subject

    @property
    def _modules(self) -> tuple[Any, ...]:
        module = self._known()
        return () if module is None else (module,)

    @property
    def _is_root(self) -> bool:
        """Whether it is still its own root: FSDP2 changes the class of a module that it shards, and keeps its state."""
        return all(kind.__name__ != "FSDPModule" for module in self._modules for kind in type(module).__mro__)


def when_made(meet: Callable[[Any], None]) -> After:
    """Return an `after` that meets what a call has made, if the call went well."""

    def made(subject: Any, _result: Any, error: BaseException | None) -> None:
        if error is None:
            meet(subject)

    return made


class Unit:
    """Modules that are sharded together, the groups of their parameters, and their owner if it is known already."""

    def __init__(
        self,
        holder: Any,
        params_of: Callable[[Any], list[Params]],
        modules_of: Callable[[Any], Iterable[Any]],
        roles: Roles,
    ) -> None:
        self._holder, self._params_of, self._modules_of = weakref.ref(holder), params_of, modules_of
        self._roles, self._subject = roles, roles.work.subject
        self._params: list[Params] = []

    def params(self) -> list[Params]:
        """Return the groups of parameters; none once the model is gone."""
        holder = self._holder()
        if holder is None:
            return []
        if not self._params:
            self._params = self._params_of(holder)
            for params in self._params:
                self._roles.name(params.holder(), self._subject)
        return self._params

    def modules(self) -> Iterable[Any]:
        """Return the modules; none once the model is gone."""
        holder = self._holder()
        return () if holder is None else self._modules_of(holder)


class Params:
    """Parameters that are sharded together: what an optimizer may hold, and the tensors that hold them now."""

    def holder(self) -> Any:
        """Return what holds them as long as it lives; None once it is gone."""
        raise NotImplementedError

    def trained(self) -> list[Any]:
        """Return what an optimizer may hold."""
        raise NotImplementedError

    def held(self) -> Iterable[Any]:
        """Return the tensors behind the parameters: the shards, and what is gathered now."""
        raise NotImplementedError

    def grads(self) -> Iterable[Any]:
        """Return the tensors of the gradients."""
        raise NotImplementedError

    def mark(self) -> Any:
        """Return something that stays the same while they hold as many bytes at the same places."""
        raise NotImplementedError

    def say_learns(self, learns: bool) -> None:
        """Say whether these are of a model that learns."""

    def kind(self) -> Any:
        """Return what others have too that go through the same states; by default only these."""
        return id(self)


class Fsdp2Params(Params):
    """A parameter group of FSDP2."""

    def __init__(self, group: Any) -> None:
        self._group = weakref.ref(group)
        # One stands for all: FSDP2 moves and frees whole tensors, and those of a group together.
        self._last = weakref.ref(group.fsdp_params[-1]) if group.fsdp_params else lambda: None
        self._place, self._place_of_grad = memory.Place(), memory.Place()

    def holder(self) -> Any:
        return self._group()

    def _params(self) -> list[Any]:
        group = self._group()
        return [] if group is None else group.fsdp_params

    def trained(self) -> list[Any]:
        return [param.sharded_param for param in self._params()]

    def held(self) -> Iterator[Any]:
        for param in self._params():
            yield param.sharded_param
        group = self._group()
        if group is not None and group.is_unsharded:
            for param in group.fsdp_params:
                yield from param.all_gather_outputs

    def grads(self) -> Iterator[Any]:
        for param in self._params():
            for grad in (param.sharded_param.grad, param.unsharded_accumulated_grad):
                if grad is not None:
                    yield grad

    def kind(self) -> Any:
        return tuple((shard.shape, shard.dtype, shard.requires_grad) for shard in self.trained())

    def mark(self) -> Any:
        # At a boundary none of this is in the processor's caches. That is the cost: 100 ns an object, of 70 groups.
        param = self._last()
        if param is None:
            return None
        shard, whole_grad = param.sharded_param, param.unsharded_accumulated_grad
        grad = shard.grad
        held = memory.local(shard)
        return (
            None if held.is_cuda else self._place.of(held),  # as `of` says, and a call less
            held.data_ptr() == 0,  # a program may empty storages, and fill them later
            param.sharded_state._value_,  # `value` is a function, in Python
            -1 if grad is None else self._place_of_grad.of(memory.local(grad)),
            None if whole_grad is None else whole_grad.is_cuda,
        )


class Fsdp1Params(Params):
    """The flat parameter of an FSDP1 module."""

    NAMES = ("_local_shard", "_mp_shard", "_full_param_padded", "_full_prec_full_param_padded")
    GRADS = ("grad", "_saved_grad_shard")

    def __init__(self, handle: Any) -> None:
        self._handle = weakref.ref(handle)
        self._places = [memory.Place() for _ in ("flat_param", *self.NAMES, *self.GRADS)]

    def holder(self) -> Any:
        return self._handle()

    def _flat(self) -> list[Any]:
        handle = self._handle()
        return [] if handle is None else [handle.flat_param]

    def trained(self) -> list[Any]:
        return [part for flat in self._flat() for part in (flat, *(getattr(flat, "_params", None) or ()))]

    def held(self) -> Iterator[Any]:
        for flat in self._flat():
            yield flat
            yield from (tensor for name in self.NAMES if (tensor := getattr(flat, name, None)) is not None)

    def grads(self) -> Iterator[Any]:
        for flat in self._flat():
            for name in self.GRADS:
                if (grad := getattr(flat, name, None)) is not None:
                    yield grad

    def mark(self) -> Any:
        # FSDP1 frees a flat parameter's storage and keeps the tensor.
        tensors = (*self.held(), *self.grads())
        places = zip(self._places, tensors, strict=False)
        return tuple((place.of(tensor), tensor.untyped_storage().nbytes()) for place, tensor in places)


class PlainParams(Params):
    """Parameters that nobody shards, of a module that DDP wraps or of an optimizer."""

    def __init__(self, holder: Any, parameters: list[Any]) -> None:
        self._holder = weakref.ref(holder)
        self._parameters = [(weakref.ref(parameter), memory.Place()) for parameter in parameters]
        self._are_whole = all(memory.local(parameter) is parameter for parameter in parameters)
        """Whether none is a DTensor."""
        self._asked = [known for known, _ in self._parameters]
        """Those whose places say where all lie."""
        self._marked: tuple[Any, Any] = None, None
        """Where the parameters lay and how many had gradients when they were last looked at, and their mark then."""

    def holder(self) -> Any:
        return self._holder()

    def say_learns(self, learns: bool) -> None:
        # What nobody trains is moved, filled and emptied as a whole: the first and the last of each kind stand for all.
        alive = ((place, known()) for place, (known, _) in enumerate(self._parameters))
        kinds = [
            place if parameter is None or (learns and parameter.requires_grad) else (parameter.shape, parameter.dtype)
            for place, parameter in alive
        ]
        self._asked = [self._parameters[place][0] for place in ends_of_kinds(kinds)]

    def trained(self) -> list[Any]:
        return [parameter for known, _ in self._parameters if (parameter := known()) is not None]

    def held(self) -> Iterable[Any]:
        return self.trained()

    def grads(self) -> Iterator[Any]:
        grads = (parameter.grad for parameter in self.trained())
        return (grad for grad in grads if grad is not None and not grad.is_sparse)  # such a one has no storage

    def mark(self) -> Any:
        # A model has hundreds of parameters, each asked at every boundary, so all of them are asked in C. A storage
        # that is emptied lies nowhere.
        alive = [parameter for known in self._asked if (parameter := known()) is not None]
        grads = sum(map(is_not, map(_GRAD, alive), repeat(None)))
        key = grads, [*map(_ADDRESS, alive if self._are_whole else map(memory.local, alive))]
        if self._marked[0] != key:
            self._marked = key, (self._sizes(), grads)
        return self._marked[1]

    def _sizes(self) -> tuple[int, ...]:
        """Return how many bytes lie on a GPU, in the host's memory, and in page-locked memory there."""
        sizes: dict[bool | None, int] = {}
        for known, place in self._parameters:
            if (parameter := known()) is not None:
                shard = memory.local(parameter)
                where = place.of(shard)
                sizes[where] = sizes.get(where, 0) + shard.untyped_storage().nbytes()
        return tuple(sizes.get(where, 0) for where in (None, False, True))


_GRAD, _ADDRESS = attrgetter("grad"), methodcaller("data_ptr")


def plain_params(sharded: Iterable[Params], holders: Iterable[tuple[Any, list[Any]]]) -> Iterator[PlainParams]:
    """Return the parameters of each holder that nobody shards, each parameter once.

    Args:
        sharded: The parameters that FSDP shards.
        holders: The holders, each with its parameters.
    """
    taken = {id(parameter) for params in sharded for parameter in params.trained()}
    is_sharding = bool(taken)  # then a DTensor is FSDP2's, though it be another object than when it was met
    for holder, parameters in holders:
        own = {id(parameter): parameter for parameter in parameters if id(parameter) not in taken}
        plain = [one for one in own.values() if not (is_sharding and memory.local(one) is not one)]
        taken |= own.keys()
        if plain:
            yield PlainParams(holder, plain)


def fsdp2_params(state: Any) -> list[Params]:
    """Return the groups of an FSDP2 state."""
    return [Fsdp2Params(group) for group in groups_of(state)]


def fsdp1_params(module: Any) -> list[Params]:
    """Return the flat parameter of an FSDP1 module, if it has one of its own."""
    handle = getattr(module, "_handle", None)
    return [] if handle is None else [Fsdp1Params(handle)]


def by_owner(subject: str, params: Params) -> Iterator[tuple[str, Iterable[Any]]]:
    """Return the owners of what parameters hold."""
    yield f"{subject}.params", params.held()
    yield grads_owner(subject), params.grads()


def grads_owner(subject: str) -> str:
    """Return the owner of the gradients of parameters that belong to this one."""
    return f"{trained_subject(subject)}.grads"


def by_place(owner: str, tensors: Iterable[Any]) -> Rows:
    """Return the bytes of tensors by where they are: `OWNER_bytes` on a GPU, `OWNER_host_bytes` in host memory.

    Of the latter, `OWNER_pinned_bytes` are page-locked, which each storage was asked.
    """
    shards = [memory.local(tensor) for tensor in tensors]
    held = memory.on_host(shard for shard in shards if not shard.is_cuda)
    on_gpu_bytes = memory.storage_bytes(shard for shard in shards if shard.is_cuda)
    return {f"{owner}_bytes": on_gpu_bytes, **host_rows(owner, held)}


def host_rows(owner: str, held: memory.OnHost) -> Rows:
    """Return the rows of an owner in host memory. Pinned bytes have no row if nobody can tell them."""
    rows = {f"{owner}{HOST_BYTES}": held.size_bytes}
    return rows if held.pinned_bytes is None else rows | {f"{owner}{PINNED_BYTES}": held.pinned_bytes}


def add(rows: Rows, more: Rows) -> None:
    """Add rows to rows; those with the same name add up."""
    for name, size in more.items():
        rows[name] = rows.get(name, 0) + size
