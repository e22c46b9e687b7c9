// Formats figures and causes as text.

export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return "–";
  if (seconds >= 9.95) return `${seconds.toFixed(0)} s`;
  if (seconds >= 0.9995) return `${seconds.toFixed(1)} s`;
  const ms = 1000 * seconds;
  return `${ms >= 9.95 ? ms.toFixed(0) : ms.toFixed(1)} ms`;
}

export function share(part) {
  return part === null || part === undefined ? "–" : `${(100 * part).toFixed(part > 0 && part < 0.1 ? 1 : 0)}%`;
}

export const count = (number) => Math.round(number).toLocaleString("en");

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

const request = (number) => (number ? `request ${number}` : "a request");

const CAUSES = {
  decodes: () => "decodes",
  prefill: (who, tokens) => `prefill of ${request(who)} (${plural(tokens, "token")})`,
  unexplained: () => "a step slower than predicted",
  host: () => "work between steps",
  garbage_collection: () => "garbage collection",
  kv_memory: () => "waiting for KV memory",
};

const REASONS = {
  end_of_prompt: "the prompt ended",
  budget: "the step's token budget was used up",
  chunk_size: "of the policy's chunk size",
  long_prefill: "of the limit for one prompt",
  alignment: "the size was rounded for speed",
  floor: "only the minimum that keeps prefill moving fitted",
  latency: "more would have made a token late",
  turn: "another tenant's first token would have come later",
  warm_up: "no larger step has been measured yet",
  shed: "the step was slow, and left out the rest to be on time",
};

export function stallInWords(stall) {
  const causes = stall.causes
    .filter(([, seconds]) => seconds >= 0.02 * stall.gap)
    .map(([kind, seconds, who, tokens]) => `${duration(seconds)} ${CAUSES[kind]?.(who, tokens) ?? kind}`);
  const others = stall.streams > 1 ? `, and ${plural(stall.streams - 1, "other")} with it` : "";
  return { gap: `A token of ${request(stall.request)} waited ${duration(stall.gap)}`, causes: `${others}: ${causes.join(", ")}.` };
}

export function stepInWords(step) {
  const parts = [];
  if (step.decodes) parts.push(`${plural(step.decodes, "decode")} ${duration(step.decodeSeconds)}`);
  for (const chunk of step.chunks) {
    const end = chunk.start + chunk.length;
    parts.push(
      `${request(chunk.request)} tokens ${count(chunk.start)} to ${count(end)} (${count(chunk.length)}) ` +
        `${duration(chunk.seconds)}, no longer because ${REASONS[chunk.reason] ?? chunk.reason}`,
    );
  }
  const predicted = step.predicted ? `, predicted ${duration(step.predicted)}` : "";
  const late = step.late ? ` ${plural(step.late, "late token")}.` : "";
  return `Step ${step.step}: ${duration(step.seconds)}${predicted}. ${parts.join("; ")}.${late}`;
}
