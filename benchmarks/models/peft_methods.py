import torch, peft
from benchmarks.models.case import *
from benchmarks.models.language import model, _DECODER, _ENCODER, _T5
_gpt2 = model("GPT2","LMHeadModel", **_DECODER, n_embd=16,n_layer=2,n_head=2,n_positions=32)
_llama = model("Llama","ForCausalLM", **_DECODER)
_bert = model("Bert","ForSequenceClassification", **_ENCODER)
_t5 = model("T5","ForConditionalGeneration", **_T5)
def _m(name, base, config, inputs=tokens, fix=None, **o):
    def build():
        c = getattr(peft, config+"Config")(**o)
        m = peft.get_peft_model(base(), c)
        if fix: fix(m)
        return m
    return Case("peft", name, build, inputs, first_output)
C="CAUSAL_LM"
T=["q_proj","v_proj"]
PEFT = [
 _m("LoRA", _llama, "Lora", task_type=C, r=2, target_modules=T, init_lora_weights=False),
 _m("LoRA, GPT-2", _gpt2, "Lora", task_type=C, r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True),
 _m("LoRA, bert", _bert, "Lora", task_type="SEQ_CLS", r=2, target_modules=["query","value"], init_lora_weights=False),
 _m("LoRA, embeddings", _llama, "Lora", task_type=C, r=2, target_modules=["embed_tokens","q_proj"], init_lora_weights=False),
 _m("LoRA, all linear, bias", _bert, "Lora", task_type="SEQ_CLS", r=2, target_modules="all-linear", init_lora_weights=False, bias="all"),
 _m("rsLoRA", _llama, "Lora", task_type=C, r=2, target_modules=T, use_rslora=True, init_lora_weights=False),
 _m("DoRA", _llama, "Lora", task_type=C, r=2, target_modules=T, use_dora=True),
 _m("LoRA, modules_to_save", _llama, "Lora", task_type=C, r=2, target_modules=T, modules_to_save=["lm_head"], init_lora_weights=False),
 _m("LoRA, trainable tokens", _llama, "Lora", task_type=C, r=2, target_modules=T, trainable_token_indices=[3,4]),
 _m("AdaLoRA", _llama, "AdaLora", task_type=C, target_modules=T, init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2),
 _m("IA3", _llama, "IA3", task_type=C, target_modules=["k_proj","v_proj","down_proj"], feedforward_modules=["down_proj"]),
 _m("IA3, GPT-2", _gpt2, "IA3", task_type=C, target_modules=["c_attn","mlp.c_proj"], feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True),
 _m("Prompt tuning", _gpt2, "PromptTuning", task_type=C, num_virtual_tokens=4),
 _m("Prompt tuning, llama", _llama, "PromptTuning", task_type=C, num_virtual_tokens=4),
 _m("P-tuning", _gpt2, "PromptEncoder", task_type=C, num_virtual_tokens=4, encoder_hidden_size=8),
 _m("P-tuning, bert", _bert, "PromptEncoder", task_type="SEQ_CLS", num_virtual_tokens=4, encoder_hidden_size=8),
 _m("Prefix tuning", _gpt2, "PrefixTuning", task_type=C, num_virtual_tokens=4),
 _m("Prefix tuning, projection", _llama, "PrefixTuning", task_type=C, num_virtual_tokens=4, prefix_projection=True, encoder_hidden_size=8),
 _m("Prompt tuning, T5", _t5, "PromptTuning", inputs=pairs, task_type="SEQ_2_SEQ_LM", num_virtual_tokens=4),
 _m("LoRA, T5", _t5, "Lora", inputs=pairs, task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q","v"], init_lora_weights=False),
 _m("LoHa", _llama, "LoHa", task_type=C, r=2, target_modules=T, init_weights=False),
 _m("LoKr", _llama, "LoKr", task_type=C, r=2, target_modules=T, init_weights=False),
 _m("OFT", _llama, "OFT", task_type=C, oft_block_size=4, r=0, target_modules=T, init_weights=False),
 _m("BOFT", _llama, "BOFT", task_type=C, boft_block_size=4, target_modules=T, init_weights=False),
 _m("VeRA", _llama, "Vera", task_type=C, r=2, target_modules=T, init_weights=False),
 _m("FourierFT", _llama, "FourierFT", task_type=C, n_frequency=5, target_modules=T),
 _m("HRA", _llama, "HRA", task_type=C, r=2, target_modules=T),
 _m("LN tuning", _llama, "LNTuning", task_type=C),
 _m("LN tuning, bert", _bert, "LNTuning", task_type="SEQ_CLS", target_modules=["LayerNorm"]),
 _m("MiSS", _llama, "Miss", task_type=C, r=2, target_modules=T),
 _m("VB-LoRA", _llama, "VBLoRA", task_type=C, r=2, num_vectors=8, vector_length=4, topk=2, target_modules=T),
 _m("RandLoRA", _llama, "RandLora", task_type=C, r=2, target_modules=T),
 _m("C3A", _llama, "C3A", task_type=C, block_size=4, target_modules=T),
 _m("SHiRA", _llama, "Shira", task_type=C, r=2, target_modules=T),
 _m("RoAd", _llama, "Road", task_type=C, group_size=8, target_modules=T),
 _m("DeLoRA", _llama, "Delora", task_type=C, r=2, target_modules=T),
 _m("GraLoRA", _llama, "Gralora", task_type=C, r=4, gralora_k=2, target_modules=T),
 _m("WaveFT", _llama, "WaveFT", task_type=C, n_frequency=6, target_modules=T),
 _m("Trainable tokens", _llama, "TrainableTokens", task_type=C, token_indices=[3,4,5]),
 _m("LLaMA-Adapter", _llama, "AdaptionPrompt", task_type=C, adapter_layers=2, adapter_len=4),
 _m("CPT", _gpt2, "CPT", task_type=C, cpt_token_ids=[3,4], cpt_mask=[1,1], cpt_tokens_type_mask=[1,2]),
 _m("HiRA", _llama, "Hira", task_type=C, r=2, target_modules=T),
 _m("Beft", _bert, "Beft", task_type="SEQ_CLS"),
]
