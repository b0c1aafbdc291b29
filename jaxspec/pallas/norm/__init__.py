"""RMSNorm, alone and fused with its neighbours, and the residual stream that it adds to."""
