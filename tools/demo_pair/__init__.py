# SPDX-License-Identifier: Apache-2.0
"""What trains and measures the demo pair: a small hybrid target and its DFlash drafter.

Needs torch, transformers, tokenizers and safetensors; never vLLM. The forward passes here are
written for training and are checked against Hugging Face's model in the tests.
"""
