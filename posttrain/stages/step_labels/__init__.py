"""The stage that labels steps of the policy's own answers by completing them."""
