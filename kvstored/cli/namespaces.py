"""Commands on whole namespaces: namespaces, retire, remove-namespace."""

import click
from rich.table import Table

from kvstored import units
from kvstored.cli.output import as_json, ask, json_option, show, table, yes_option
from kvstored.cli.reach import Target, daemon_options, listed, namespace_named
from kvstored.core.types import TierId
from kvstored.pb import kvstored_pb2 as pb


@click.command()
@daemon_options
@json_option
def namespaces(*, target: Target, is_json: bool) -> None:
    """List the namespaces: what each holds, its block size and groups."""
    with target.client() as client:
        known = listed(client)

    def text() -> Table | str:
        made = table(
            *("namespace", "digest", "tokens a block >", "groups", "blocks >", "dram >", "nvme >"),
            "state",
        )
        for each in known:
            sizes = [units.format_about(size) for size in [*each.tier_bytes, 0, 0, 0, 0][:4]]
            made.add_row(
                *(each.alias, each.digest.hex()[:12], str(each.namespace.block_tokens)),
                ", ".join(_group_text(group) for group in each.namespace.groups),
                *(str(each.blocks), sizes[TierId.DRAM], sizes[TierId.NVME]),
                "retired" if each.retired else "in use",
            )
        return made if known else "no namespaces"

    show({"namespaces": [as_json(each) for each in known]}, text, is_json=is_json)


def _group_text(group: pb.Group) -> str:
    return f"{group.name} {pb.GroupKind.Name(group.kind).lower()} {units.format_size(group.bytes_per_block)}"


@click.command()
@click.argument("namespace")
@daemon_options
@json_option
def retire(*, namespace: str, target: Target, is_json: bool) -> None:
    """Retire NAMESPACE: still readable, but its blocks are the first to be evicted."""
    with target.client() as client:
        found = namespace_named(client, namespace)
        request = pb.RetireNamespaceRequest(namespace=found.digest)
        client.call("RetireNamespace", request, pb.RetireNamespaceResponse)
    value = {"namespace": found.digest.hex(), "alias": found.alias}
    show(value, lambda: f"retired {found.alias}", is_json=is_json)


@click.command("remove-namespace")
@click.argument("namespace")
@yes_option
@daemon_options
@json_option
def remove_namespace(*, namespace: str, is_agreed: bool, target: Target, is_json: bool) -> None:
    """Forget NAMESPACE and every block of it."""
    with target.client() as client:
        found = namespace_named(client, namespace)
        ask(f"Forget {found.alias} with {found.blocks} blocks?", is_agreed=is_agreed)
        request = pb.RemoveNamespaceRequest(namespace=found.digest)
        blocks = client.call("RemoveNamespace", request, pb.RemoveNamespaceResponse).blocks
    show({"blocks": blocks}, lambda: f"removed {blocks} blocks", is_json=is_json)


COMMANDS = (namespaces, retire, remove_namespace)
