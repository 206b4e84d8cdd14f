"""Speculative decoding in PyTorch: the operators that `sgl_kernel` has for CPUs.

SGLang imports them by these names. Trees have one root, the last accepted token, as their node 0.
Requests are rows; `req_to_token` is `[requests, tokens]`, the slots of each request's tokens.
"""

import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType

import torch

_FULL_MASK, _NEW_ONLY_MASK = 0, 1
"""SGLang's tree mask modes: what a node sees of all tokens, or of the nodes."""


def install() -> None:
    """Offer what SGLang imports from a module below `sgl_kernel`."""
    module = ModuleType("sgl_kernel.speculative")
    module.reconstruct_indices_from_tree_mask = trees_of_masks  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def fill_bonus_tokens_cpu(
    tokens: torch.Tensor, lengths: torch.Tensor, bonus: torch.Tensor, stride: int
) -> None:
    """The last of each request's accepted tokens, `lengths` of the next `stride` ones."""
    rows = torch.arange(len(lengths)) * stride
    bonus[: len(lengths)] = tokens.reshape(-1)[rows + lengths - 1].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(
    accepted: torch.Tensor, slots: torch.Tensor, out: torch.Tensor
) -> None:
    """Slots of the accepted tokens, one after the other; an index of -1 accepts nothing."""
    indices = accepted.reshape(-1)
    found = slots[indices[indices > -1].long()]
    out[: len(found)] = found.to(out.dtype)


def assign_extend_cache_locs_cpu(
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    out: torch.Tensor,
    _pool_length: int,
) -> None:
    """Slots of the tokens from `start` to `end` of each request, one after the other."""
    for request, tokens, rows in _spans(requests, start, end):
        out[rows] = req_to_token[request, tokens].to(out.dtype)


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    start: torch.Tensor,
    end: torch.Tensor,
    slots: torch.Tensor,
    _pool_length: int,
) -> None:
    """The other way round: `slots` become those of the tokens from `start` to `end`."""
    for request, tokens, rows in _spans(requests, start, end):
        req_to_token[request, tokens] = slots[rows].to(req_to_token.dtype)


def _spans(
    requests: torch.Tensor, start: torch.Tensor, end: torch.Tensor
) -> Iterator[tuple[int, slice, slice]]:
    row = 0
    for request, first, last in zip(requests.tolist(), start.tolist(), end.tolist(), strict=True):
        yield request, slice(first, last), slice(row, row := row + last - first)


def assign_draft_cache_locs_contiguous_cpu(
    requests: torch.Tensor,
    req_to_token: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    pool_length: int,
    topk: int,
    steps: int,
) -> None:
    """Slots for the drafts of each request: the `topk * steps` behind its tokens."""
    end = lengths + topk * steps
    assign_extend_cache_locs_cpu(requests, req_to_token, lengths, end, out, pool_length)


def build_draft_decode_metadata_cpu(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    lengths: torch.Tensor,
    topk: int,
    steps: int,
    pool_length: int,
) -> torch.Tensor:
    """Slots of each branch, `[requests * topk, tokens]`: its request's tokens, then drafts."""
    branches = req_to_token.new_zeros((len(requests) * topk, pool_length))
    for row, (request, length) in enumerate(zip(requests.tolist(), lengths.tolist(), strict=True)):
        slots = req_to_token[request]
        for branch, out in enumerate(branches[row * topk : (row + 1) * topk]):
            drafts = slots[length + branch * steps :][:steps]
            out[:length] = slots[:length]
            out[length : length + len(drafts)] = drafts
    return branches


def build_tree_kernel_efficient_cpu(
    parents: torch.Tensor,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor,
    index: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    topk: int,
    _depth: int,
    nodes: int,
    mask_mode: int,
) -> None:
    """Trees of the drafts that were selected, in the tables that a verification walks.

    Args:
        parents: For each group of `topk` drafts the draft that they follow, `[requests, groups]`.
        selected: The drafts of each tree but for its root, `[requests, nodes - 1]`.
        mask: What nodes see, as `mask_mode` says; written.
        positions: `[requests * nodes]`, written; the tables `[requests, nodes]` too.
    """
    start = 0
    for row, length in enumerate(lengths.tolist()):
        drafts, follows = selected[row].tolist(), parents[row].tolist()
        of_draft = {draft: 1 + place for place, draft in enumerate(drafts)}
        parent = [-1] + [
            of_draft.get(follows[draft // topk], 0) if draft >= topk else 0 for draft in drafts
        ]
        seen = torch.eye(nodes, dtype=torch.bool)
        for node in range(1, nodes):  # parents stand before their children
            seen[node] |= seen[parent[node]]
        if mask is not None and mask_mode in (_FULL_MASK, _NEW_ONLY_MASK):
            before = length if mask_mode == _FULL_MASK else 0
            rows = mask[start : (start := start + nodes * (before + nodes))].view(nodes, -1)
            rows[:, :before], rows[:, before:] = True, seen
        _fill_tables(row, length, seen, parent, positions, index, first_child, next_sibling)


def trees_of_masks(
    mask: torch.Tensor,
    lengths: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
    _requests: int,
    nodes: int,
) -> None:
    """The tables of trees of which only the masks are known, `[requests, nodes, nodes]`."""
    for row, seen in enumerate(mask.view(-1, nodes, nodes).bool()):
        above = seen & ~torch.eye(nodes, dtype=torch.bool)
        parent = [max(ancestors, default=-1) for ancestors in map(_places, above)]
        _fill_tables(
            row, int(lengths[row]), seen, parent, positions, index, first_child, next_sibling
        )


def _places(row: torch.Tensor) -> list[int]:
    return row.nonzero().flatten().tolist()


def _fill_tables(
    row: int,
    length: int,
    seen: torch.Tensor,
    parent: list[int],
    positions: torch.Tensor,
    index: torch.Tensor,
    first_child: torch.Tensor,
    next_sibling: torch.Tensor,
) -> None:
    """Of one tree behind `length` tokens; `seen`: itself and its ancestors, of each node."""
    nodes = len(parent)
    own = torch.arange(row * nodes, (row + 1) * nodes)
    positions[own], index[row] = length + seen.sum(1) - 1, own
    first_child[row], next_sibling[row] = -1, -1
    for node in reversed(range(nodes)):
        if parent[node] >= 0:
            next_sibling[row, node] = first_child[row, parent[node]]
            first_child[row, parent[node]] = node


def verify_tree_greedy_cpu(
    *,
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Accept drafts as long as the model says the same, from the root of each tree downwards.

    Args:
        predicts: The model's tokens at accepted nodes, `[requests * nodes]`, written.
        accept_index: Accepted nodes, the root first, `[requests, steps + 1]`, written.
        accept_token_num: Drafts that were accepted, `[requests]`, written.
        candidates: Tokens of the nodes, `[requests, nodes]`.
        target_predict: What the model says behind each node, `[requests * nodes]`.
    """
    said = target_predict.reshape(-1)
    for row, tokens in enumerate(candidates.tolist()):
        own, accepted, node = retrive_index[row].tolist(), 0, 0
        accept_index[row, 0] = own[0]
        while accepted + 1 < accept_index.shape[1]:
            wanted = int(said[own[node]])
            child = int(retrive_next_token[row, node])
            while child >= 0 and tokens[child] != wanted:
                child = int(retrive_next_sibling[row, child])
            if child < 0:
                break
            predicts[own[node]] = wanted
            node, accepted = child, accepted + 1
            accept_index[row, accepted] = own[node]
        predicts[own[node]], accept_token_num[row] = said[own[node]], accepted


def rotate_input_ids_cpu(
    ids: torch.Tensor,
    start: torch.Tensor,
    lengths: torch.Tensor,
    new: torch.Tensor,
    select: torch.Tensor | None = None,
) -> None:
    """Each request's tokens move one to the left; its new one is the last, or at `select`."""
    for row, (first, length) in enumerate(zip(start.tolist(), lengths.tolist(), strict=True)):
        if length:
            last = first + length - 1
            ids[first:last] = ids[first + 1 : last + 1].clone()
            ids[last if select is None else int(select[row])] = new.reshape(-1)[row]


def copy_all_layer_kv_cache_cpu(
    buffers: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor
) -> None:
    """K and V of tokens to other slots, in all buffers, given by address and bytes of a slot."""
    for address, size in zip(buffers.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in source.tolist()]
        for slot, row in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)
