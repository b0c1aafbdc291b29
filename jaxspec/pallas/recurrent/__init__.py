"""What all recurrent layers share: choosing a state, replaying tokens, convolution, chunks."""
