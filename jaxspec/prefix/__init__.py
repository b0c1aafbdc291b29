"""The prefix cache: pages and states on the device, blocks in host memory and on disk. No JAX.

    Scheduler ─▶ PrefixCache ─┬─▶ PrefixStore: PrefixTree, PagePool                   device
                              └─▶ PrefixArrivals ─▶ HostTier ─▶ DiskTier              host, disk

A request that enters starts at the longest cached prefix, and its pages and states are cached while
it runs. `PrefixStore` plans all copies that this needs: they run before the step of the next plan.

    node            full or partly filled page of the device's tree, with a cached state or without
    tail            node of a partly filled page, which exists for its state alone
    block           pages, or one state with its tail, in host memory or in a file
    key             identifies a page or state in a block: digest of the text before it, and tokens
    BlockRef        page or state found in a block
    PrefixMatch     longest prefix on the device; HostPrefixMatch: in all tiers together
    PrefixHit       prefix at which a request enters, always on the device
    tier            `HostTier` or `DiskTier`; each has a `BlockIndex`, and evicts its oldest blocks

Evicted pages and states of the device are copied to a block, evicted blocks of the host to a file.
Back, for a waiting request (`PrefixArrivals`): `DiskTier.want` reads the file, `BlockMover.stage`
copies the block to the device, and `PrefixStore.restore` adds its pages and state to the tree.
"""
