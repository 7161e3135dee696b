import torch
from rolloutmq import BlockingRolloutClient, GenerateJob, SamplingParams, WeightPublisher
from rolloutmq.ops.tiny_model import load_tiny_model

model = load_tiny_model("out/tiny")  # your own: AutoModelForCausalLM.from_pretrained
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
prompts, sampling = [[10 + i, 20, 30] for i in range(8)], SamplingParams(max_new_tokens=16)
with BlockingRolloutClient() as client, WeightPublisher() as publisher:
    start = publisher.last_version + 1
    publisher.publish(start, model.state_dict().items())  # the pool begins with these weights, whatever it had before
    for version in range(start + 1, start + 11):
        client.submit_many(GenerateJob(token_ids=p, n=8, min_version=start, sampling=sampling) for p in prompts)
        for group in client.groups(timeout=300):
            rewards = torch.tensor([float((r.token_ids % 2 == 0).mean()) for r in group.results])
            for r, advantage in zip(group.results, rewards - rewards.mean()):
                ids = torch.tensor([*r.prompt_ids, *r.token_ids])
                logits = model(ids[None, :-1]).logits[0, -len(r.token_ids) :]
                logprobs = torch.log_softmax(logits, -1).gather(1, ids[-len(r.token_ids) :, None])[:, 0]
                ratio = torch.exp(logprobs - torch.tensor(r.logprobs)).clamp(max=2.0)  # trained with / sampled with
                (-advantage * ratio.mean() / 64).backward()
        optimizer.step(), optimizer.zero_grad()
        publisher.publish(version, model.state_dict().items())  # returns at once; workers switch when it is verified
        print(f"version {version}: last group's reward {rewards.mean():.2f}, sampled with versions {r.versions}")
