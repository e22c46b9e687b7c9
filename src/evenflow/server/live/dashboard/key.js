// The API key, where the server needs one: kept for this tab, until it is closed.

const NAME = "evenflow-api-key";

export function authorization() {
  const key = sessionStorage.getItem(NAME);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function askForKey(onKey) {
  const form = document.getElementById("key-form");
  const field = document.getElementById("key");
  form.hidden = false;
  form.onsubmit = (event) => {
    event.preventDefault();
    sessionStorage.setItem(NAME, field.value.trim());
    field.value = "";
    form.hidden = true;
    onKey();
  };
}

// What a refusal says, in the shape that OpenAI's errors have.
export async function refusal(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `The server answered ${response.status}.`;
}
