"""The probe as a callback of other trainers. Each file imports its library; gradscope itself needs none of them."""
