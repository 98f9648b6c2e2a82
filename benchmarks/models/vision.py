from benchmarks.models.case import *
from benchmarks.models.language import model, VOCABULARY
_ENC = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_VIT = _ENC | {"image_size": 8, "patch_size": 4}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4, "mlp_ratio": 2.0}
def _v(name, kind, head="ForImageClassification", size=8, loss=first_output, inputs=None, **o):
    return Case("vision", name, model(kind, head, **o), inputs or pixels(size), loss)
VISION = [
 _v("ViT", "ViT", **_VIT),
 _v("DeiT", "DeiT", **_VIT),
 _v("BEiT", "Beit", **_VIT),
 _v("BEiT, relative positions", "Beit", use_relative_position_bias=True, **_VIT),
 _v("Data2Vec vision", "Data2VecVision", use_relative_position_bias=True, **_VIT),
 _v("DINOv2", "Dinov2", **_VIT),
 _v("ViT-MSN", "ViTMSN", **_VIT),
 _v("Swin", "Swin", size=16, **_SWIN),
 _v("Swin, absolute positions", "Swin", size=16, use_absolute_embeddings=True, **_SWIN),
 _v("Swin v2", "Swinv2", size=16, **_SWIN),
 _v("ConvNeXt", "ConvNext", size=32, hidden_sizes=[8,8], depths=[1,1], num_stages=2, patch_size=4),
 _v("ConvNeXt v2", "ConvNextV2", size=32, hidden_sizes=[8,8], depths=[1,1], num_stages=2, patch_size=4),
 _v("SegFormer", "Segformer", size=32, hidden_sizes=[8,8], depths=[1,1], num_encoder_blocks=2, num_attention_heads=[1,2], sr_ratios=[2,1], patch_sizes=[3,3], strides=[2,2], mlp_ratios=[2,2]),
 _v("PVT", "Pvt", size=32, image_size=32, hidden_sizes=[8,8], depths=[1,1], num_encoder_blocks=2, num_attention_heads=[1,2], sequence_reduction_ratios=[2,1], patch_sizes=[4,2], strides=[4,2], mlp_ratios=[2,2]),
 _v("PoolFormer", "PoolFormer", size=32, hidden_sizes=[8,8], depths=[1,1], num_encoder_blocks=2, patch_sizes=[3,3], strides=[2,2], padding=[1,1], mlp_ratio=2),
 _v("ResNet", "ResNet", size=16, embedding_size=8, hidden_sizes=[8,8], depths=[1,1], layer_type="basic"),
 _v("RegNet", "RegNet", size=16, embedding_size=8, hidden_sizes=[8,8], depths=[1,1], groups_width=4),
 _v("MobileNet v2", "MobileNetV2", size=32, depth_multiplier=.25),
 _v("MobileViT", "MobileViT", size=32, image_size=32, hidden_sizes=[8,8,8], neck_hidden_sizes=[8]*7, num_attention_heads=2),
 _v("CvT", "Cvt", size=32, patch_sizes=[3,3], patch_stride=[2,2], patch_padding=[1,1], embed_dim=[8,8], num_heads=[1,2], depth=[1,1], mlp_ratio=[2.,2.], attention_drop_rate=[0.,0.], drop_rate=[0.,0.], drop_path_rate=[0.,0.], qkv_bias=[True,True], cls_token=[False,True], qkv_projection_method=["linear","linear"], kernel_qkv=[3,3], padding_kv=[1,1], stride_kv=[2,2], padding_q=[1,1], stride_q=[1,1]),
 _v("MAE (ViT)", "ViTMAE", "Model", mask_ratio=0.5, **_VIT),
 _v("YOLOS", "Yolos", "Model", **(_VIT | {"image_size":[8,8], "num_detection_tokens":3, "use_mid_position_embeddings": False})),
 _v("Perceiver", "Perceiver", "Model", inputs=lambda b: {"inputs": torch.randn(b, 9, 16)}, d_model=16, num_latents=4, d_latents=16, num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2),
 _v("SigLIP, image tower", "Siglip", "VisionModel", **{}) if False else Case("vision", "SigLIP, image tower", lambda: __import__("transformers").SiglipVisionModel(__import__("transformers").SiglipVisionConfig(**_VIT)), pixels(8), first_output),
]
_W2V = {"vocab_size": VOCABULARY, "hidden_size":16, "num_hidden_layers":2, "num_attention_heads":2, "intermediate_size":24, "conv_dim":[8,8], "conv_kernel":[4,3], "conv_stride":[4,2], "num_conv_pos_embeddings":4, "num_conv_pos_embedding_groups":2, "num_feat_extract_layers":2, "mask_time_prob":0.0, "pad_token_id":0, "feat_extract_norm": "layer", "ctc_loss_reduction": "sum"}
def _a(name, kind, head, **o): return Case("speech", name, model(kind, head, **{**_W2V, **o}), waveforms(128), first_output)
def _frozen_pos(build):
    def b():
        m = build()
        for n, x in m.named_modules():
            if "pos_conv_embed" in n:
                for p in x.parameters(): p.requires_grad_(False)
        return m
    return b
SPEECH = [
 _a("wav2vec 2.0, CTC", "Wav2Vec2", "ForCTC"),
 Case("speech","wav2vec 2.0, CTC, frozen positions", _frozen_pos(model("Wav2Vec2","ForCTC",**_W2V)), waveforms(128), first_output),
 _a("wav2vec 2.0, group norm", "Wav2Vec2", "ForCTC", feat_extract_norm="group"),
 _a("wav2vec 2.0, classification", "Wav2Vec2", "ForSequenceClassification"),
 _a("HuBERT, CTC", "Hubert", "ForCTC"),
 _a("WavLM, CTC", "WavLM", "ForCTC"),
 _a("SEW, CTC", "SEW", "ForCTC"),
 Case("speech","Whisper", model("Whisper","ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, num_mel_bins=4, max_source_positions=10, max_target_positions=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, suppress_tokens=None, begin_suppress_tokens=None), lambda b: {"input_features": torch.randn(b,4,20), "decoder_input_ids": torch.randint(3,VOCABULARY,(b,6))}, first_output),
 Case("speech","AST", model("AST","ForAudioClassification", **_ENC, patch_size=4, frequency_stride=4, time_stride=4, max_length=16, num_mel_bins=8), lambda b: {"input_values": torch.randn(b,16,8)}, first_output),
 Case("speech","Speech2Text", model("Speech2Text","ForConditionalGeneration", vocab_size=VOCABULARY, d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, input_feat_per_channel=4, conv_channels=8, max_source_positions=40, max_target_positions=12), lambda b: {"input_features": torch.randn(b,20,4), "decoder_input_ids": torch.randint(3,VOCABULARY,(b,6))}, first_output),
]
def _clip_inputs(b): return tokens(b) | pixels(8)(b)
_text = {"vocab_size": VOCABULARY, **_ENC, "max_position_embeddings": 20, "bos_token_id":0, "eos_token_id":2, "pad_token_id":1}
def both_towers(o): return (o.image_embeds - o.text_embeds).square().sum(1)
MULTI = [
 Case("multi", "CLIP, embeddings", model("CLIP","Model", text_config=_text, vision_config=_VIT, projection_dim=8), _clip_inputs, both_towers),
 Case("multi", "CLIP, contrastive", model("CLIP","Model", text_config=_text, vision_config=_VIT, projection_dim=8), _clip_inputs, lambda o: o.logits_per_image.square().sum(1)),
 Case("multi", "SigLIP, embeddings", model("Siglip","Model", text_config=_text, vision_config=_VIT), _clip_inputs, both_towers),
 Case("multi", "ViLT", model("Vilt","Model", **_VIT, vocab_size=VOCABULARY, max_position_embeddings=20, max_image_length=-1), lambda b: _clip_inputs(b) | {"pixel_mask": torch.ones(b,8,8)}, first_output),
 Case("multi", "BLIP, retrieval", model("Blip","ForImageTextRetrieval", text_config=_text|{"encoder_hidden_size":16}, vision_config=_VIT), _clip_inputs, lambda o: o.itm_score.square().sum(1)),
 Case("multi", "PatchTST", model("PatchTST","ForPrediction", num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, d_model=16, num_attention_heads=2, num_hidden_layers=2, ffn_dim=24, prediction_length=4, norm_type="layernorm", loss="mse"), lambda b: {"past_values": torch.randn(b,16,2)}, first_output),
 Case("multi", "LLaVA", model("Llava","ForConditionalGeneration", text_config={"model_type":"llama", **_text, "num_key_value_heads":2, "pad_token_id":0}, vision_config={"model_type":"clip_vision_model", **_VIT}, image_token_index=39, image_seq_length=4, vision_feature_layer=-1), lambda b: {"input_ids": torch.cat([torch.full((b,4),39), torch.randint(3,38,(b,5))],1), "pixel_values": torch.randn(b,3,8,8)}, lambda o: o.logits.flatten(1).square().mean(1)),
]
