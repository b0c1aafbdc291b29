def fill_masks(matchers, drafts, masks):
    for m, d, mask in zip(matchers, drafts, masks, strict=True):
        m.fill(d, mask)
