"""An asyncio program that uses every kind of function, lets some of them fail, and dies of an exception."""

import asyncio

from service import Service
from shown_errors import show_error


def plain(service):
    print(service.add(1), service.add(1, b=2), Service.named("x"), Service.doubled(4))
    try:
        service.add(1, b=-1)
    except ValueError as error:
        show_error(error)
    try:
        try:
            raise LookupError("the program's own")
        except LookupError:
            service.add(1, b=-2)
    except ValueError as error:
        show_error(error)
    try:
        service.add()
    except TypeError as error:
        show_error(error)


def generators(service):
    for make in (service.count, service.items):
        generator = make(2)
        print(next(generator), generator.send("a"))
        try:
            generator.send("b")
        except StopIteration as stop:
            print("returned", stop.value)
        abandoned = make(2)
        next(abandoned)
        abandoned.close()
        thrown = make(2)
        next(thrown)
        try:
            thrown.throw(PermissionError("thrown"))
        except PermissionError as error:
            show_error(error)
        try:
            print(list(make(4)))
        except OverflowError as error:
            show_error(error)
    with service.opened("a") as name:
        print(name)
        raise LookupError("inside")


async def coroutines(service):
    print(await service.fetch("a"), await service.fetch_later("b"))
    print(await asyncio.gather(*(service.fetch(i) for i in range(3))))
    for make in (service.fetch, service.fetch_later):
        try:
            await make(None)
        except KeyError as error:
            show_error(error)
    stream = service.stream(3)
    print(await stream.__anext__(), await stream.asend("hello"), await stream.__anext__())
    print(await stream.athrow(LookupError("thrown in")))
    await stream.aclose()
    try:
        print([item async for item in service.stream(4)])
    except OverflowError as error:
        show_error(error)
    async with service.connected("c") as name:
        print(name)
    task = asyncio.create_task(asyncio.wait_for(wait_in(service), 0.01))
    try:
        await task
    except asyncio.TimeoutError as error:
        show_error(error)


async def wait_in(service):
    async with service.connected("slow"):
        await asyncio.Event().wait()


service = Service()
plain(service)
generators(service)
asyncio.run(coroutines(service))
print(service.log)
service.add(1, b=-3)
