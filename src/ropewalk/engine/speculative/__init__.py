"""Speculative decoding: a drafter guesses the next tokens of a request, the model checks several guesses in one pass.

The model draws its tokens one after another as it always does, from the logits of that one pass; a guess only decides
whether the logits after it are of any use. Draws are keyed by seed and position (`engine.draws`), so whatever is
drafted, the tokens are those of a run without drafts, greedy or sampled, and there is no ratio test.

    drafter     what a drafter is
    lookup      guesses by finding the end of the text earlier in the text
    model       guesses with a second, smaller model
    pace        how many guesses pay, from measured times and acceptance
    speculator  joins them for the engine
"""
